"""The list of peers is told once: what the reporter passes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from operator_host import OperatorHost, make_identity, version

from keepstep.wire.reports import Peer, Report, ReportReply
from keepstep_sidecar.commit.operator_link import OperatorLink
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.sidecar import Reporting, believing
from keepstep_sidecar.report.reporter import Look, Reporter
from tests.harness import until

FIRST = (Peer(node_rank=1, address="10.0.0.1:9465", buddy=True),)
SECOND = (Peer(node_rank=1, address="10.0.0.2:9465", buddy=True),)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorHost]:
    made = OperatorHost(make_identity(tmp_path / "tls"), world=1)
    made.interval_s = 1.0
    made.peers = FIRST
    yield made.start()
    made.stop()


class Heard:
    """What a reporter said it has, and what it passed on."""

    def __init__(self, operator: OperatorHost) -> None:
        self._operator = operator
        self.peers: list[tuple[Peer, ...]] = []

    @property
    def held(self) -> list[str]:
        return [one.peers_version for _, one in self._operator.seen.reports]

    async def obey(self, reply: ReportReply) -> None:
        self.peers.append(reply.peers)

    async def again(self, count: int) -> None:
        there = len(self.peers)
        await until(lambda: len(self.peers) >= there + count, within_s=20)


@asynccontextmanager
async def reporting(operator: OperatorHost, tmp_path: Path) -> AsyncIterator[Heard]:
    (tmp_path / "token").write_text("node-0")
    changes, heard = Changes(), Heard(operator)
    link = OperatorLink(changes, present=True)

    async def nothing() -> tuple[()]:
        return ()

    def report(_: object, sequence: int) -> Report:
        return Report(sidecar="1", started_at=1.0, sequence=sequence)

    reporter = Reporter(
        Reporting(url=operator.url, ca=operator.pem, token_file=tmp_path / "token"),
        Look(measure=nothing, report=report, urgent=lambda: True),
        trust=believing(operator.pem),
        operator=link,
        obey=heard.obey,
        changes=changes,
    )
    task = asyncio.create_task(reporter.run())
    await heard.again(2)
    yield heard
    link.finishing = True
    changes.ring()
    await task


async def test_a_list_that_is_not_repeated_stands_and_another_one_takes_its_place(
    operator: OperatorHost, tmp_path: Path
) -> None:
    async with reporting(operator, tmp_path) as heard:
        assert (heard.held[:2], heard.peers[:2]) == (["", version(FIRST)], [FIRST, FIRST])
        operator.peers = SECOND
        await heard.again(3)
        assert (heard.held[-1], heard.peers[-1]) == (version(SECOND), SECOND)
        operator.peers = ()
        await heard.again(3)
        assert (heard.held[-1], heard.peers[-1]) == (version(()), ())
