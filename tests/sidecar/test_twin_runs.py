"""Twins are told as runs to those who read them, as lists to all others, and mean the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from operator_host import OperatorHost, make_identity

from keepstep.core.ranks import MOST_RUNS, Ranks
from keepstep.core.shard import Shard
from keepstep.steps import Answer, EpochId, StepId
from keepstep.wire.reports import Report, ReportedRank, ReportedShard
from keepstep_sidecar.commit.operator_link import OperatorLink
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.sidecar import Reporting, believing
from keepstep_sidecar.report.report import news
from keepstep_sidecar.report.reporter import Look, Reporter
from keepstep_sidecar.tiers.peer.protocol import Listed, Listing
from tests.harness import until

WORLD = 16_384
SHARD = Shard(
    step_id=StepId(EpochId(1, "aaaaaaaa"), 4),
    rank=8,
    world=WORLD,
    root="0" * 32,
    size_bytes=1 << 30,
    alike=Ranks.of(range(0, WORLD, 8)),
)
TWINS = [one for one in range(0, WORLD, 8) if one != 8]

# --- to peers ------------------------------------------------------------------------------------


def listing(shard: Shard = SHARD) -> Listing:
    return Listing(run="gpt", shards=(Listed.listed(shard, copy=False),))


def heard(told: Listing | dict[str, Any]) -> Shard:
    (one,) = msgspec.json.decode(msgspec.json.encode(told), type=Listing).shards
    return one.shard(one.rank)


def test_what_is_told_as_runs_is_short_whatever_the_world() -> None:
    assert len(msgspec.json.encode(listing())) < 400
    assert heard(listing()) == SHARD
    assert heard(listing()).alike is SHARD.alike


def test_an_older_reader_is_told_the_list_that_it_always_was() -> None:
    told = msgspec.to_builtins(listing().with_lists())
    assert [*told["shards"][0]["twins"]] == TWINS


def test_a_list_of_an_older_pod_is_the_same_shard() -> None:
    told = msgspec.to_builtins(listing().with_lists())
    del told["shards"][0]["twin_runs"]
    assert heard(told) == SHARD


def test_what_would_be_many_runs_stays_a_list() -> None:
    squares = Ranks.of(one * one for one in range(2 * MOST_RUNS + 2) if one * one < WORLD)
    odd = replace(SHARD, rank=0, alike=Ranks.of([*squares, WORLD - 1, WORLD - 3, WORLD - 4]))
    told = msgspec.to_builtins(listing(odd))
    assert not told["shards"][0]["twin_runs"]["runs"]
    assert heard(told) == odd


@pytest.mark.parametrize(
    "runs",
    [[[0, 10**12, 1]], [[0, WORLD, 8]], [[0, 16, 16]], [[one, one, 1] for one in range(66)]],
)
def test_runs_that_cannot_be_are_refused_as_they_are_read(runs: list[list[int]]) -> None:
    told = msgspec.to_builtins(listing())
    told["shards"][0]["twin_runs"]["runs"] = runs
    with pytest.raises(msgspec.ValidationError, match=r"twins|ranks"):
        heard(told)


# --- to the operator -----------------------------------------------------------------------------


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorHost]:
    made = OperatorHost(make_identity(tmp_path / "tls"), world=WORLD)
    made.interval_s = 600.0
    yield made
    made.stop()


def report(sequence: int) -> Report:
    rank = ReportedRank(
        rank=8,
        world=WORLD,
        alive=True,
        local=(ReportedShard.of(SHARD),),
        memory_answer=Answer.NONE,
        local_answer=Answer.STEPS,
    )
    return Report(sidecar="1", started_at=1.0, sequence=sequence, sent_at=1.0, ranks=(rank,))


async def told(operator: OperatorHost, tmp_path: Path, count: int) -> list[ReportedShard]:
    """What the first reports say of the image, as they came."""
    operator.start()
    (tmp_path / "token").write_text("node-0")
    changes = Changes()
    link = OperatorLink(changes, present=True)

    async def nothing(*_: object) -> tuple[()]:
        return ()

    reporter = Reporter(
        Reporting(url=operator.url, ca=operator.pem, token_file=tmp_path / "token"),
        Look(measure=nothing, report=lambda _, at: report(at), news=news, urgent=lambda: False),
        trust=believing(operator.pem),
        operator=link,
        obey=nothing,
        changes=changes,
    )
    task = asyncio.create_task(reporter.run())
    await until(lambda: len(operator.seen.reports) >= count, within_s=20)
    link.finishing = True
    changes.ring()
    await task
    return [one.ranks[0].local[0] for _, one in operator.seen.reports[:count]]


async def test_an_operator_that_reads_runs_is_told_no_list(
    operator: OperatorHost, tmp_path: Path
) -> None:
    (first,) = await told(operator, tmp_path, 1)
    assert (first.twins, first.twin_runs) == ((), SHARD.alike)


async def test_an_operator_that_says_nothing_of_runs_is_told_lists_at_once(
    operator: OperatorHost, tmp_path: Path
) -> None:
    operator.reads_runs = False
    first, second = await told(operator, tmp_path, 2)
    assert first.twins == ()
    assert [*second.twins] == TWINS
