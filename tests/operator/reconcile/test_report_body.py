"""A report is read in small parts, and says what it would have said as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
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
from keepstep_operator.reconcile.reports_api import LARGEST_REPORT_BYTES
from keepstep_operator.reconcile.state.actions import EmitEvent
from keepstep_operator.reconcile.token_auth import Refused
from keepstep_operator.reconcile.writers.events import event_bodies
from tests.operator.promises.hostile import REPORTS
from tests.operator.promises.surface import Body, epoch, held, rank, report
from tests.operator.reconcile.samples import Play, Sidecar, later, pod, policy


def as_large_as_may_be() -> Body:
    """Many ranks of other pods of which one saw something archived: what the fewest bytes name."""
    ranks = [
        {"rank": one, "world": 65_536, "alive": False, "memory_answer": "none",
         "archive": [held(step, 65_536) for step in range(5)], "archive_answer": "steps"}
        for one in range(8192)
    ]  # fmt: skip
    return report(*ranks)


def one_long_rank() -> Body:
    told = rank(0, 1, memory=tuple(range(2000)), local=tuple(range(1000)))
    ids = [{"epoch": epoch(), "step": one} for one in range(900)]
    return report(told | {"gone": {"archive": ids}})


def endless_runs_of_twins() -> Body:
    told = rank(0, 65_536, local=(1,))
    told["local"][0]["alike"] = {"runs": [[one, one, 1] for one in range(240_000)]}
    return report(told)


def one_endless_rank() -> Body:
    return report(rank(0, 1, local=tuple(range(40_000))))


def _seconds(body: bytes) -> list[float]:
    """CPU of each part, until it is read or refused."""
    parts, found, goes_on = read(body), list[float](), True
    while goes_on:
        begun_s = time.thread_time()
        try:
            next(parts)
        except (StopIteration, Refused, msgspec.ValidationError):
            goes_on = False
        found.append(time.thread_time() - begun_s)
    return found


@pytest.mark.parametrize(
    "long", [*REPORTS, as_large_as_may_be, one_long_rank, one_endless_rank, endless_runs_of_twins]
)
def test_no_part_of_a_report_takes_long(long: Callable[[], Body]) -> None:
    body = msgspec.json.encode(long())
    assert len(body) <= LARGEST_REPORT_BYTES
    rounds = [_seconds(body) for _ in range(3)]  # whatever else the machine does, it does once
    slowest_s = max(map(min, zip(*rounds, strict=True)))
    assert slowest_s <= 0.05, f"{slowest_s * 1000:.0f} ms of {sum(rounds[0]) * 1000:.0f}"


def _whole(body: Body) -> Report:
    async def work() -> Report:
        return await turns.Turns().work(read(msgspec.json.encode(body)), tenant="team")

    return asyncio.run(work())


def test_a_long_rank_says_what_a_short_one_says() -> None:
    steps = tuple(range(1000))
    told = rank(3, 8, memory=steps[:4], local=steps, archive=steps)
    told["local"][5]["alike"] = {"runs": [(3, 7, 2)]}
    restore = {"rank": 3, "epoch": {"id": epoch()}, "tier": "local", "seconds": 1.0, "at": 2.0}
    volume = {"name": "nvme0", "engine": "direct", "used_bytes": 1, "free_bytes": 1}
    gone = {"peer": [{"epoch": epoch(), "step": 7}]}
    body = report(
        told | {"gone": gone},
        rank(4, 8, local=(1,)),
        restores=[restore],
        volumes=[volume],
        warnings=["a volume is slow"],
        pinned="mlock",
    )
    read_in_parts = _whole(body)
    assert read_in_parts == msgspec.convert(body, Report)
    assert read_in_parts.ranks[0].gone[Tier.PEER][0].step == 7


def test_what_is_no_report_is_refused_wherever_it_stands() -> None:
    told = rank(0, 1, local=tuple(range(1000)))
    told["local"][999]["world"] = "many"
    for spoilt in (report(told), report(rank(0, 1) | {"alive": 3}), report(epochs=[{"id": 1}])):
        with pytest.raises(msgspec.ValidationError):
            _whole(spoilt)


def test_more_ranks_of_others_than_a_sidecar_tells_of_are_refused() -> None:
    ranks = [
        {"rank": one, "world": 65_536, "alive": False, "archive": [held(1, 65_536)]}
        for one in range(8193)
    ]
    with pytest.raises(Refused, match="more ranks"):
        _whole(report(*ranks))


@pytest.mark.parametrize("number", [-1, 65_536])
def test_a_restore_of_a_rank_that_cannot_be_is_refused(number: int) -> None:
    restore = {"rank": number, "epoch": {"id": epoch()}, "tier": None, "seconds": 1.0, "at": 2.0}
    with pytest.raises(Refused, match="restore of a rank"):
        _whole(report(rank(0, 1), restores=[restore]))


async def test_a_short_report_waits_for_a_slice_of_each_other_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "SLICE_S", 0.0)  # of one part
    worker, worked = turns.Turns(), list[str]()

    def work(tenant: str, parts: int) -> turns.Parts[None]:
        for _ in range(parts):
            worked.append(tenant)
            yield

    asked = [*[("evil", 50)] * 3, ("team", 2), ("team", 1)]
    await asyncio.gather(*(worker.work(work(*one), tenant=one[0]) for one in asked))
    assert worked[:4] == ["evil", "team"] * 2
    assert worked.index("team", 4) <= 8
    assert worked[10:] == ["evil"] * (len(worked) - 10)


async def test_work_that_fails_leaves_nothing_behind() -> None:
    """What was read of a refused report is freed at once, not when garbage is looked for."""

    class Body:
        pass

    def work() -> turns.Parts[None]:
        held = Body()
        held_by.append(weakref.ref(held))
        yield
        raise Refused(429, "budget", "come again later")

    held_by, worker = list[weakref.ref[Body]](), turns.Turns()
    gc.disable()
    try:
        with contextlib.suppress(Refused):
            await worker.work(work(), tenant="team")
        await asyncio.sleep(0)
        assert held_by[0]() is None
    finally:
        gc.enable()


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
        "depots": [{"tier": "peer", "where": "any", "backlog": 3, "trouble": "any"}],
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
