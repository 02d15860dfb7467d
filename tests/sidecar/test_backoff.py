"""The pause of a reporter whose leader is away."""

from __future__ import annotations

import asyncio
from typing import Any

from keepstep_sidecar.commit.leader_state_record import ReportingState
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.report.reporter import LeaderReporter, ReportSource


async def test_the_backoff_of_the_reporter_ends_early_when_a_caller_waits() -> None:
    waiting, changes = False, ChangeNotifier()
    unused: Any = None
    reporter = LeaderReporter(
        unused,
        ReportSource(measure=unused, report=unused, urgent=lambda: waiting),
        leader=ReportingState(changes),
        apply=unused,
        changes=changes,
    )
    reporter._failures = 40  # now it pauses for 15 to 30 s
    pause = asyncio.create_task(reporter._until_due())
    await asyncio.sleep(5.0)
    assert not pause.done()
    waiting = True
    changes.ring()
    async with asyncio.timeout(5.0):
        await pause
