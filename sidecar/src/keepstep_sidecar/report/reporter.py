"""Tells the run's leader what this machine holds, and passes on the answers.

Nothing waits for it. While the leader is away, slow or not trusted, training, commits on this
machine and restores go on. A report is sent on a change, but not more often than the leader allows,
and after a silence. A change for which no other machine waits goes with the next one, or two
seconds after the last. A report is whole, or it tells what changed since the last report, if a
leader answered that one that knows all of it. No report is ever sent again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from keepstep.core.restore_vote import NEVER
from keepstep.errors import KeepstepError
from keepstep.wire.member_reports import Report, ReportReply
from keepstep.wire.status import VolumeStatus
from keepstep_sidecar.commit.leader_state_record import ReportingState
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.report.leader_channel import Channel, ReportFailed
from keepstep_sidecar.report.report import pressing_news, reduce_to_changes, strip_volatile_fields

_log = logging.getLogger("keepstep.sidecar")

_LONGEST_BACKOFF_S = 30.0
_FIRST_BACKOFF_S = 5.0
_FIRST_FAILURES = 30
"""How many first retries are quick: the other side may only begin again."""
_MEASURING_S = 2.0
"""The longest pause between these retries while the connection fails: there is nobody whom they
could overload."""
_AT_ONCE_S = 0.5
"""A broken connection is retried within this time."""
_LONGEST_URGENT_BACKOFF_S = 4.0
"""A new leader must hear of all machines before it can introduce them to each other."""

_URGENT_S = 1.0
_LATER_S = 2.0
_MEASURE_EVERY_S = 10.0
_MEASURE_TIMEOUT_S = 5.0
_BOUNDS_INTERVAL_S = (1.0, 600.0)
_BOUNDS_GAP_S = (0.05, 60.0)


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """How the reporter sees the sidecar. `measure` may take as long as a drive does."""

    measure: Callable[[], Awaitable[tuple[VolumeStatus, ...]]]
    report: Callable[[tuple[VolumeStatus, ...], int], Report]
    urgent: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """When a report is due. Pure. Times: seconds since the last attempt; `failures`: in a row.
    `waits`: something has changed that waits for a more pressing change."""

    interval_s: float = 30.0
    least_gap_s: float = 1.0
    waits: bool = False

    @classmethod
    def clamped_to_bounds(cls, interval_s: float, least_gap_s: float) -> Rhythm:
        """The rhythm that the other side wants, within bounds."""
        return cls(
            interval_s=_within(interval_s, _BOUNDS_INTERVAL_S),
            least_gap_s=_within(least_gap_s, _BOUNDS_GAP_S),
        )

    def max_report_interval_s(self, *, urgent: bool, chance: float) -> float:
        """The longest silence between reports. `chance` in 0..1 spreads the pods of a run."""
        silence_s = self.interval_s * (0.8 + 0.4 * chance)
        if urgent:
            silence_s = max(self.least_gap_s, _URGENT_S)
        return min(silence_s, self.max_deferral_s) if self.waits else silence_s

    @property
    def max_deferral_s(self) -> float:
        """How long a change waits for a more pressing one."""
        return max(_LATER_S, 2 * self.least_gap_s)

    def backoff_s(
        self, failures: int, *, urgent: bool = False, broken: bool = False, chance: float
    ) -> float:
        """How long to wait after the `failures`-th failure in a row. `broken`: of the
        connection."""
        if broken and failures == 1:
            return _AT_ONCE_S * chance
        exponential: float = self.least_gap_s * 2.0 ** min(failures - 1, 10)
        longest = _LONGEST_BACKOFF_S
        if broken and failures <= _FIRST_FAILURES:
            longest = max(_MEASURING_S, self.least_gap_s)
        elif urgent:
            longest = _LONGEST_URGENT_BACKOFF_S
        elif failures <= _FIRST_FAILURES:
            longest = max(_FIRST_BACKOFF_S, self.least_gap_s)
        return min(exponential, longest) * (0.5 + 0.5 * chance)


class _Volumes:
    """The volumes as they were measured last: not for every report."""

    def __init__(self, measure: Callable[[], Awaitable[tuple[VolumeStatus, ...]]]) -> None:
        self._measure = measure
        self._found: tuple[VolumeStatus, ...] = ()
        self._measured_at = -_MEASURE_EVERY_S

    async def measured(self) -> tuple[VolumeStatus, ...]:
        """A drive that hangs does not hold up reports."""
        now = time.monotonic()
        if now - self._measured_at < _MEASURE_EVERY_S and self._found:
            return self._found
        self._measured_at = now
        try:
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                self._found = await self._measure()
        except (KeepstepError, TimeoutError) as error:
            warn("volume.measure_failed", error=str(error) or "no answer in time")
        return self._found


class LeaderReporter:
    """One task, `run`, does everything. It records in `leader` how reporting goes; `leader`
    also makes it send the last report and end."""

    def __init__(
        self,
        channel: Channel,
        source: ReportSource,
        *,
        leader: ReportingState,
        apply: Callable[[ReportReply], Awaitable[None]],
        changes: ChangeNotifier,
    ) -> None:
        self._channel = channel
        self._leader = leader
        self._source = source
        self._volumes = _Volumes(source.measure)
        self._apply = apply
        self._changes = changes
        self._rhythm = Rhythm()
        self._sequence = 0
        self._failures = 0
        self._broken = False
        self._logged: set[str] = set()
        self._tried_at = -_BOUNDS_INTERVAL_S[1]
        self._seen = -1
        self._sent: Report | None = None
        self._known: Report | None = None
        """The last report, if the leader said that it can go on from that one."""

    async def run(self) -> None:
        """Report until `ReportingState.send_last_report`."""
        self._leader.ended = False
        try:
            async with self._channel:
                while not self._leader.finishing:
                    await self._until_due()
                    if not self._leader.finishing:
                        await self._guarded()
                await self._guarded()
        finally:
            self._leader.ended = True
            self._changes.ring()

    # --- when --------------------------------------------------------------------------------

    async def _until_due(self) -> None:
        if self._failures:
            await self._after_failures()
            return
        if self._sent is not None:
            await self._changes.until(
                lambda: self._leader.finishing or self._changes.count != self._seen,
                timeout_s=self._silence_s(random.random()) - self._since(),
            )
        await self._pause(self._rhythm.least_gap_s - self._since())

    async def _after_failures(self) -> None:
        """Wait after failures. The pause ends sooner when the answer becomes urgent."""
        failed_at, chance = time.monotonic(), random.random()

        def is_over() -> bool:
            urgent = self._source.urgent()
            pause_s = self._rhythm.backoff_s(
                self._failures, urgent=urgent, broken=self._broken, chance=chance
            )
            return self._leader.finishing or time.monotonic() - failed_at >= pause_s

        while not is_over():
            await self._changes.until(is_over, timeout_s=0.2 if self._failures == 1 else 1.0)

    async def _pause(self, seconds: float) -> None:
        await self._changes.until(lambda: self._leader.finishing, timeout_s=seconds)

    def _since(self) -> float:
        return time.monotonic() - self._tried_at

    def _is_due(self, report: Report) -> bool:
        """Whether this report is worth sending now."""
        if (
            self._leader.finishing
            or self._failures
            or self._sent is None
            or self._channel.is_report_due
        ):
            return True
        changed = strip_volatile_fields(report)
        self._rhythm = replace(self._rhythm, waits=changed != self._sent)
        if self._rhythm.waits and pressing_news(changed) != pressing_news(self._sent):
            return True
        return self._since() >= self._silence_s(0.0)

    def _silence_s(self, chance: float) -> float:
        return self._rhythm.max_report_interval_s(urgent=self._source.urgent(), chance=chance)

    # --- what --------------------------------------------------------------------------------

    async def _guarded(self) -> None:
        """Exchange one report. An error in our own code costs this report, but not later ones."""
        try:
            await self._exchange()
        except Exception:
            self._failures += 1
            _log.exception("report.crashed")
        if self._leader.tried_at == NEVER and self._sequence:
            self._leader.tried_at = time.monotonic()
            self._changes.ring()

    async def _exchange(self) -> None:
        self._seen = self._changes.count
        if (pushed := self._channel.take_pushed()) is not None:
            await self._apply(pushed)
        report = self._source.report(await self._volumes.measured(), self._sequence + 1)
        if not self._is_due(report):
            return
        self._sequence += 1
        self._tried_at = time.monotonic()
        changed, self._known = reduce_to_changes(self._known, report), None
        try:
            reply = await self._channel.exchange(changed)
        except ReportFailed as failure:
            self._failed(failure)
            return
        self._succeeded(report, changed, reply)
        await self._apply(reply)

    # --- how it went -------------------------------------------------------------------------

    def _failed(self, failure: ReportFailed) -> None:
        self._failures += 1
        self._leader.failing = True
        self._changes.ring()
        self._broken = failure.kind == "connection"
        if failure.kind not in self._logged:
            self._logged.add(failure.kind)
            address, kind = self._channel.address, failure.kind
            warn("leader.report_failed", address=address, kind=kind, error=str(failure))

    def _succeeded(self, report: Report, changed: Report, reply: ReportReply) -> None:
        """`changed`: what was sent of `report`. If the leader cannot follow changes, the next
        report is sent whole, at once."""
        if self._failures or self._leader.replied_at is None:
            address = self._channel.address
            info("leader.report_accepted", address=address, failures=self._failures)
        self._failures = 0
        self._leader.failing = False
        self._logged.clear()
        self._leader.replied_at = time.time()
        follows = reply.changes_since == report.sequence
        self._known = report if follows else None
        taken = follows or not changed.since
        self._sent = strip_volatile_fields(report) if taken else None
        self._rhythm = Rhythm.clamped_to_bounds(reply.interval_s, reply.least_gap_s)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
