"""The leader's reports to the operator: over HTTPS, with the pod's token.

Nothing waits for it. While the operator is away, slow or not trusted, the run goes on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from keepstep.errors import UsageError
from keepstep.leader.leader import Leader
from keepstep.leader.run_report import build_run_report, fit_to_size
from keepstep.wire.run_reports import LeaderAnswer, RunReport
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.config.sidecar import OperatorAccess
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.report.leader_channel import ReportFailed
from keepstep_sidecar.report.reporter import Rhythm

_TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0, connect=5.0)
_REPLY_LIMIT_BYTES: Final = 4 << 20
_LAST_S: Final = 2.0
_LEAST_GAP_S: Final = 1.5
"""The operator refuses reports that come within a second."""
_PART: Final = 50
"""Working out a report takes at most one part in so many of the time, while `_CHECK_S` allows."""
_CHECK_S: Final = 10.0
"""How often to look whether a doubt has come by waiting alone."""

_decode = msgspec.json.Decoder(LeaderAnswer).decode
_encode = msgspec.json.Encoder().encode


class OperatorReporter:
    """One task, `run`, does everything. `answered(answer)`: the operator has answered. `follow()`:
    called every second or so."""

    def __init__(
        self,
        config: OperatorAccess,
        leader: Leader,
        changes: ChangeNotifier,
        *,
        answered: Callable[[LeaderAnswer], None],
        follow: Callable[[], None],
    ) -> None:
        self._config, self._leader, self._changes = config, leader, changes
        self._answered, self._follow = answered, follow
        self._rhythm = Rhythm(least_gap_s=_LEAST_GAP_S)
        self._sequence = 1
        self._sent: tuple[object, ...] | None = None
        self._failures, self._broken = 0, False
        self._logged: set[str] = set()
        self._gap_s = _LEAST_GAP_S
        self._checked_at = 0.0

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._report()
            await self._until_due()

    async def report_shutdown(self) -> None:
        """Report the end of this sidecar, if the operator answers at all."""
        if not self._failures:
            try:
                async with asyncio.timeout(_LAST_S):
                    await self._post(self._summary())
            except (ReportFailed, TimeoutError) as error:
                warn("operator.last_report_failed", error=str(error) or "no answer in time")

    # --- when --------------------------------------------------------------------------------

    async def _until_due(self) -> None:
        """Return when the operator's interval is over; sooner for what a person would act on."""
        chance, began, seen = random.random(), time.monotonic(), self._changes.count
        pause_s = self._rhythm.max_report_interval_s(urgent=False, chance=chance)
        if self._failures:
            pause_s = self._rhythm.backoff_s(self._failures, broken=self._broken, chance=chance)
        while (left_s := began + pause_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _LEAST_GAP_S))
            self._follow()
            if not self._failures and self._is_due_to_check(seen):
                seen = self._changes.count
                if self._news(self._summary()) != self._sent:
                    return

    def _is_due_to_check(self, seen: int) -> bool:
        since_s = time.monotonic() - self._checked_at
        return since_s >= (self._gap_s if self._changes.count != seen else _CHECK_S)

    def _summary(self) -> RunReport:
        began = time.monotonic()
        found = build_run_report(self._leader, sequence=self._sequence, at=time.time())
        self._checked_at = time.monotonic()
        took_s = self._checked_at - began
        self._gap_s = min(_CHECK_S, max(_LEAST_GAP_S, _PART * took_s))
        return found

    def _news(self, report: RunReport) -> tuple[object, ...]:
        """What the operator is told at once: what a person would act on, and what the next leader
        must know."""
        record = report.record
        nodes = tuple(holder.node for holder in record.holders)
        kept = record.restore_from, nodes
        return report.doubts, report.alarms, report.recent, report.acknowledged, kept

    # --- what --------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Exchange one report. The first one is repeated until it is answered: the answer has the
        record of an earlier leader."""
        self._follow()
        report = self._summary()
        try:
            answer = await self._post(report)
        except ReportFailed as failure:
            self._failed(failure)
            return
        if self._failures or self._sent is None:
            info("operator.report_accepted", url=self._config.address, failures=self._failures)
        self._failures, self._broken = 0, False
        self._logged.clear()
        self._sent = self._news(report)
        self._sequence += 1
        self._rhythm = Rhythm.clamped_to_bounds(answer.interval_s, _LEAST_GAP_S)
        self._answered(answer)

    def _failed(self, failure: ReportFailed) -> None:
        self._failures += 1
        self._broken = failure.kind == "connection"
        if failure.kind not in self._logged:
            self._logged.add(failure.kind)
            url = self._config.address
            warn("operator.report_failed", kind=failure.kind, error=str(failure), url=url)

    async def _post(self, report: RunReport) -> LeaderAnswer:
        """The answer to a report. Raises ReportFailed. No redirects: the token is for this address
        only."""
        report = fit_to_size(report, lambda report: len(_encode(report)))
        try:
            token = self._config.token()
        except UsageError as error:
            raise ReportFailed("token", str(error)) from error
        try:
            trust = await asyncio.to_thread(self._config.make_ssl_context)
        except UsageError as error:
            raise ReportFailed("authorities", str(error)) from error
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connector = aiohttp.TCPConnector(ssl=trust, limit=1)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session,
                session.post(
                    self._config.address,
                    data=_encode(report),
                    headers=headers,
                    allow_redirects=False,
                ) as response,
            ):
                data = await _read(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReportFailed(_kind(error), f"{error or type(error).__name__}") from error
        if response.status != 200:
            raise ReportFailed(f"status {response.status}", data[:300].decode(errors="replace"))
        try:
            return _decode(data)
        except (ValueError, RecursionError) as error:
            raise ReportFailed("reply", f"the answer is no reply: {error}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = b""
    async for piece in response.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > _REPLY_LIMIT_BYTES:
            raise ReportFailed("reply", "the operator's answer is too long")
    return data


def _kind(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "tls"
    return "timeout" if isinstance(error, TimeoutError) else "connection"
