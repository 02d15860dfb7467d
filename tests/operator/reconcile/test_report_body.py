"""A report is read in small parts, and says what it would have said as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from keepstep.steps import Tier
from keepstep.wire.reports import Report
from keepstep_operator.api.policy import VolumeKind
from keepstep_operator.api.run import as_json
from keepstep_operator.api.tiers import Peers
from keepstep_operator.reconcile import turns
from keepstep_operator.reconcile.report_body import read
from keepstep_operator.reconcile.state.actions import EmitEvent
from keepstep_operator.reconcile.token_auth import Refused
from keepstep_operator.reconcile.writers.events import event_bodies
from tests.operator.apiserver import Body
from tests.operator.reconcile.samples import FIRST, Play, Sidecar, later, pod, policy, step

EPOCH: Body = msgspec.to_builtins(FIRST.id)


def report(*sidecars: Sidecar, **more: Any) -> Body:
    """One report of the ranks of these sidecars, as JSON."""
    found: list[Body] = [msgspec.to_builtins(one.report()) for one in sidecars]
    return found[0] | {"ranks": [rank for one in found for rank in one["ranks"]]} | more


def _whole(body: Body) -> Report:
    async def work() -> Report:
        return await turns.Turns().work(read(msgspec.json.encode(body)), tenant="team")

    return asyncio.run(work())


def test_a_long_rank_says_what_a_short_one_says() -> None:
    steps = [step(number) for number in range(1000)]
    restore = {"rank": 3, "epoch": {"id": EPOCH}, "tier": "local", "seconds": 1.0, "at": 2.0}
    volume = {"name": "nvme0", "engine": "direct", "used_bytes": 1, "free_bytes": 1}
    body = report(
        Sidecar(rank=3, world=8, memory=steps[:4], local=steps, archive=steps),
        Sidecar(rank=4, world=8).durable(1),
        restores=[restore],
        volumes=[volume],
        warnings=["a volume is slow"],
    )
    told = body["ranks"][0]
    told["tiers"]["local"]["shards"][5]["alike"] = {"runs": [(3, 7, 2)]}
    told["tiers"]["peer"] = {"answer": "none", "gone": [{"epoch": EPOCH, "step": 7}]}
    read_in_parts = _whole(body)
    assert read_in_parts == msgspec.convert(body, Report)
    assert read_in_parts.ranks[0].tiers[Tier.PEER].gone[0].step == 7


def test_what_is_no_report_is_refused_wherever_it_stands() -> None:
    long, short = report(Sidecar(rank=0).durable(*range(1000))), report(Sidecar(rank=0))
    long["ranks"][0]["tiers"]["local"]["shards"][999]["world"] = "many"
    short["ranks"][0]["alive"] = 3
    for spoilt in (long, short, report(Sidecar(rank=0), epochs=[{"id": 1}])):
        with pytest.raises(msgspec.ValidationError):
            _whole(spoilt)


def test_more_ranks_of_others_than_a_sidecar_tells_of_are_refused() -> None:
    held = {"step_id": {"epoch": EPOCH, "step": 1}, "world": 65_536}
    ranks = [
        {
            "rank": one,
            "world": 65_536,
            "alive": False,
            "tiers": {"archive": {"answer": "steps", "shards": [held | {"rank": one}]}},
        }
        for one in range(8193)
    ]
    with pytest.raises(Refused, match="more ranks"):
        _whole(report(Sidecar(rank=0), ranks=ranks))


@pytest.mark.parametrize("number", [-1, 65_536])
def test_a_restore_of_a_rank_that_cannot_be_is_refused(number: int) -> None:
    restore = {"rank": number, "epoch": {"id": EPOCH}, "tier": None, "seconds": 1.0, "at": 2.0}
    with pytest.raises(Refused, match="restore of a rank"):
        _whole(report(Sidecar(rank=0), restores=[restore]))


_HOSTILE = "\x1b]0;pwned\x07\x9b2J\u202e"


def _hostile(value: Any) -> Any:
    """The same report with this in front of every text that may be any text."""
    match value:
        case dict():
            return {key: _hostile(one) for key, one in value.items()}
        case list() | tuple():
            return [_hostile(one) for one in value]
        case "any":
            return f"{_HOSTILE}any"
    return value


def test_nothing_that_a_pod_says_reaches_a_status_or_an_event_unprintable() -> None:
    pods = [pod(rank, volumes=(VolumeKind.HOST_PATH,)) for rank in (0, 1)]
    play = Play(*pods, known_policy=policy(peers=Peers()))
    told = {
        "warnings": ["any"],
        "volumes": [
            {"name": "any", "failed": "any", "engine": "any", "used_bytes": 1, "free_bytes": 0}
        ],
        "tiers": {"peer": {"where": "any", "backlog": 3, "trouble": "any"}},
        "refusals": 3,
        **dict.fromkeys(("sidecar", "library", "pinned", "peer_address", "refused"), "any"),
    }
    for one in pods:
        said = Sidecar(rank=one.node_rank, epochs=[])
        play.hear(one, said.report())
        said.restored(replace(later(2, 3), origin="any"), tier=Tier.ARCHIVE).staged(8, 9)
        play.hear(one, _whole(_hostile(msgspec.to_builtins(said.report()) | told)))
    play.wait(600.0)
    status = as_json(play.status)
    events = [body["note"] for one in play.actions if isinstance(one, EmitEvent)
              for body in event_bodies(one, run_uid="run-1", at=play.now)]  # fmt: skip
    texts = [*_texts(status), *events]
    assert "any/" in status["origin"]
    assert sum("any" in one for one in texts) > 5, "they are shown"
    assert [one for one in texts if not one.isprintable()] == []


def _texts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for one in value.items():
                yield from _texts(list(one))
        case list():
            for one in value:
                yield from _texts(one)
        case str():
            yield value
