"""Tells the operator what this pod holds, and passes on the operator's answers.

Nothing waits for it. While the operator is away, slow or not trusted, training, commits on this pod
and restores go on. A report is sent on a change, but not more often than the operator allows, and
after a silence. It is whole, or it tells what changed since the last report, if an operator
answered that one that knows all of it. No report is ever sent again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec

from keepstep.core.vote import NEVER
from keepstep.errors import KeepstepError, UsageError
from keepstep.wire.reports import Peer, Report, ReportReply
from keepstep.wire.status import VolumeStatus
from keepstep_sidecar.commit.operator_link import OperatorLink
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.sidecar import Reporting
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.report.report import changes, news

_log = logging.getLogger("keepstep.sidecar")

_TIMEOUT = aiohttp.ClientTimeout(total=10.0, connect=5.0)
_LONGEST_BACKOFF_S = 30.0
_FIRST_BACKOFF_S = 5.0
_FIRST_FAILURES = 30
"""How many first retries are quick: another replica of the operator leads within half a minute."""
_LOOKING_S = 2.0
"""The longest pause between these retries while the connection fails: there is no operator that
they could overload."""
_NOBODY_S = 3
"""A node that acknowledges nothing for so long is taken for lost. The kernel of a slow process
still acknowledges."""
_AT_ONCE_S = 0.5
"""A broken connection is retried within this time: the next one may lead to another replica."""
_LONGEST_URGENT_BACKOFF_S = 4.0
"""A new operator must hear of all pods before it can introduce them to each other."""

_URGENT_S = 1.0
_MEASURE_EVERY_S = 10.0
_MEASURE_TIMEOUT_S = 5.0
_REPLY_LIMIT_BYTES = 1 << 20
_BOUNDS_INTERVAL_S = (1.0, 600.0)
_BOUNDS_GAP_S = (0.05, 60.0)


class _Failed(Exception):
    """The operator did not accept a report. `kind`: short and stable; each kind is logged once."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Look:
    """How the reporter sees the sidecar. `measure` may take as long as a drive does."""

    measure: Callable[[], Awaitable[tuple[VolumeStatus, ...]]]
    report: Callable[[tuple[VolumeStatus, ...], int], Report]
    urgent: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """When a report is due. Pure. Times: seconds since the last attempt; `failures`: in a row."""

    interval_s: float = 30.0
    least_gap_s: float = 1.0

    @classmethod
    def of(cls, reply: ReportReply) -> Rhythm:
        """The rhythm that the operator wants, within bounds."""
        return cls(
            interval_s=_within(reply.interval_s, _BOUNDS_INTERVAL_S),
            least_gap_s=_within(reply.least_gap_s, _BOUNDS_GAP_S),
        )

    def silence_s(self, *, urgent: bool, chance: float) -> float:
        """The longest silence between reports. `chance` in 0..1 spreads the pods of a run."""
        if urgent:
            return max(self.least_gap_s, _URGENT_S)
        return self.interval_s * (0.8 + 0.4 * chance)

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
            longest = max(_LOOKING_S, self.least_gap_s)
        elif urgent:
            longest = _LONGEST_URGENT_BACKOFF_S
        elif failures <= _FIRST_FAILURES:
            longest = max(_FIRST_BACKOFF_S, self.least_gap_s)
        return min(exponential, longest) * (0.5 + 0.5 * chance)


class Reporter:
    """One task, `run`, does everything. It records in `operator` how reporting goes; `operator`
    also makes it send the last report and end."""

    def __init__(
        self,
        config: Reporting,
        look: Look,
        *,
        trust: ssl.SSLContext,
        operator: OperatorLink,
        obey: Callable[[ReportReply], Awaitable[None]],
        changes: Changes,
    ) -> None:
        self._config = config
        self._operator = operator
        self._look = look
        self._obey = obey
        self._changes = changes
        self._trust = trust
        self._authorities = config.authorities()
        self._decode = msgspec.json.Decoder(ReportReply).decode
        self._rhythm = Rhythm()
        self._sequence = 0
        self._failures = 0
        self._broken = False
        self._logged: set[str] = set()
        self._tried_at = -_BOUNDS_INTERVAL_S[1]
        self._seen = -1
        self._sent: Report | None = None
        self._known: Report | None = None
        """The last report, if the operator said that it can go on from that one."""
        self._peers: tuple[Peer, ...] = ()
        self._peers_version = ""
        self._volumes: tuple[VolumeStatus, ...] = ()
        self._measured_at = -_MEASURE_EVERY_S

    async def run(self) -> None:
        """Report until `OperatorLink.finish`."""
        self._operator.ended = False
        connector = aiohttp.TCPConnector(limit=1, socket_factory=_socket)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
                while not self._operator.finishing:
                    await self._until_due()
                    if not self._operator.finishing:
                        await self._guarded(session)
                await self._guarded(session)
        finally:
            self._operator.ended = True
            self._changes.ring()

    # --- when --------------------------------------------------------------------------------

    async def _until_due(self) -> None:
        if self._failures:
            await self._after_failures()
            return
        if self._sent is not None:
            silence_s = self._rhythm.silence_s(urgent=self._look.urgent(), chance=random.random())
            await self._changes.until(
                lambda: self._operator.finishing or self._changes.count != self._seen,
                timeout_s=silence_s - self._since(),
            )
        await self._pause(self._rhythm.least_gap_s - self._since())

    async def _after_failures(self) -> None:
        """Wait after failures. The pause ends sooner when the answer becomes urgent."""
        failed_at, chance = time.monotonic(), random.random()

        def is_over() -> bool:
            urgent = self._look.urgent()
            pause_s = self._rhythm.backoff_s(
                self._failures, urgent=urgent, broken=self._broken, chance=chance
            )
            return self._operator.finishing or time.monotonic() - failed_at >= pause_s

        while not is_over():
            await self._changes.until(is_over, timeout_s=0.2 if self._failures == 1 else 1.0)

    async def _pause(self, seconds: float) -> None:
        await self._changes.until(lambda: self._operator.finishing, timeout_s=seconds)

    def _since(self) -> float:
        return time.monotonic() - self._tried_at

    def _is_due(self, report: Report) -> bool:
        """Whether this report is worth sending now."""
        if self._operator.finishing or self._failures or self._sent is None:
            return True
        silence_s = self._rhythm.silence_s(urgent=self._look.urgent(), chance=0.0)
        return self._since() >= silence_s or news(report) != self._sent

    # --- what --------------------------------------------------------------------------------

    async def _guarded(self, session: aiohttp.ClientSession) -> None:
        """Exchange one report. An error in our own code costs this report, but not later ones."""
        try:
            await self._exchange(session)
        except Exception:
            self._failures += 1
            _log.exception("report failed")
        if self._operator.tried_at == NEVER and self._sequence:
            self._operator.tried_at = time.monotonic()
            self._changes.ring()

    async def _exchange(self, session: aiohttp.ClientSession) -> None:
        self._seen = self._changes.count
        await self._measure()
        report = self._look.report(self._volumes, self._sequence + 1)
        if not self._is_due(report):
            return
        self._sequence += 1
        self._tried_at = time.monotonic()
        told, self._known = changes(self._known, report), None
        told = replace(told, peers_version=self._peers_version)
        try:
            reply = self._with_peers(await self._post(session, told))
        except _Failed as failure:
            self._failed(failure)
            return
        self._succeeded(report, told, reply)
        await self._learn(reply.authorities)
        await self._obey(reply)

    async def _learn(self, authorities: str) -> None:
        """Take over the authorities by which the operator is trusted from now on. A new authority
        signs only a day after it was announced, and the key of an old one may be in other hands."""
        if not authorities or authorities == self._authorities:
            return
        self._authorities = authorities
        try:
            self._trust = await asyncio.to_thread(self._config.learn, authorities)
        except (UsageError, OSError) as error:
            warn("authorities of the operator not taken over", reason=str(error))
        else:
            say("authorities of the operator taken over")

    async def _measure(self) -> None:
        """Measure the space on the volumes, but not for every report. A drive that hangs does not
        hold up reports."""
        now = time.monotonic()
        if now - self._measured_at < _MEASURE_EVERY_S and self._volumes:
            return
        self._measured_at = now
        try:
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                self._volumes = await self._look.measure()
        except (KeepstepError, TimeoutError) as error:
            warn("volumes not measured", reason=str(error) or "no answer in time")

    async def _post(self, session: aiohttp.ClientSession, report: Report) -> ReportReply:
        headers = {
            "Authorization": f"Bearer {_token(self._config.token_file)}",
            "Content-Type": "application/json",
        }
        body = msgspec.json.encode(report)
        try:
            # No redirects: the token is for this address only.
            async with session.post(
                self._config.address,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=self._trust,
            ) as response:
                data = await _read(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Failed(_kind(error), f"{error or type(error).__name__}") from error
        if response.status != 200:
            raise _Failed(f"status {response.status}", data[:300].decode(errors="replace"))
        try:
            return self._decode(data)
        except (ValueError, RecursionError) as error:
            raise _Failed("reply", f"the answer is none: {error}") from error

    def _with_peers(self, reply: ReportReply) -> ReportReply:
        """Add the known list of peers: the operator does not repeat an unchanged list."""
        if reply.peers_version == self._peers_version:
            return replace(reply, peers=self._peers)
        self._peers, self._peers_version = reply.peers, reply.peers_version
        return reply

    # --- how it went -------------------------------------------------------------------------

    def _failed(self, failure: _Failed) -> None:
        self._failures += 1
        self._broken = failure.kind == "connection"
        if failure.kind not in self._logged:
            self._logged.add(failure.kind)
            warn("report failed", kind=failure.kind, reason=str(failure), url=self._config.address)

    def _succeeded(self, report: Report, told: Report, reply: ReportReply) -> None:
        """`told`: what was sent of `report`. If the operator cannot follow changes, the next report
        is sent whole, at once."""
        if self._failures or self._operator.heard_at is None:
            say("reporting", url=self._config.address, failures=self._failures)
        self._failures = 0
        self._logged.clear()
        self._operator.heard_at = time.time()
        follows = reply.changes_since == report.sequence
        self._known = report if follows else None
        taken = follows or not told.since
        self._sent = news(report) if taken else None
        self._rhythm = Rhythm.of(reply)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that gives up a lost node after `_NOBODY_S` seconds, while it connects as well as
    later. (The first SYN is repeated once, after a second, and given up two seconds later.)"""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NOBODY_S * 1000)
    return made


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = b""
    async for piece in response.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > _REPLY_LIMIT_BYTES:
            raise _Failed("reply", "the operator's answer is too long")
    return data


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _token(path: Path) -> str:
    """Read the token anew each time: Kubernetes replaces the file before the token expires."""
    try:
        token = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise _Failed("token", f"cannot read the token: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise _Failed("token", f"{path} holds no token")
    return token


def _kind(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "tls"
    return "timeout" if isinstance(error, TimeoutError) else "connection"
