"""Reports to the run's leader: in this process, or over the member's connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.errors import UsageError
from keepstep.steps import EpochId, StepId
from keepstep.wire.member_reports import (
    LeaderReply,
    MemberReport,
    Peer,
    PinnedSteps,
    Report,
    ReportReply,
)
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.leader.host import Host
from keepstep_sidecar.log import RareWarning

if TYPE_CHECKING:
    from keepstep_sidecar.leader.link import LeaderConnection

_CONNECTED_S = 2.0
_ANSWER_S = 10.0
_LAST_WORD_S = 3.0

_decode = msgspec.json.Decoder(LeaderReply).decode
_complain = RareWarning()


class ReportFailed(Exception):
    """A report was not taken. `kind`: short and stable; each kind is logged once."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Channel:
    """How the run's leader is reached, at `address`. `link`: None where the run has no other
    machine. `frame`: what each frame says. `epoch`: returns the newest epoch that this machine
    knows of. `leaves`: returns whether its pod begins to end."""

    address: str

    def __init__(
        self,
        link: LeaderConnection | None,
        *,
        frame: MemberReport,
        changes: ChangeNotifier,
        epoch: Callable[[], EpochId | None],
        leaves: Callable[[], bool],
    ) -> None:
        self._link = link
        self._sent, self.pins = frame, frame.pins
        self._leaves, self._left = leaves, False
        self._running: asyncio.Task[None] | None = None
        self._changes, self._epoch = changes, epoch
        self._news: LeaderReply | None = None
        self._acknowledged = 0
        self._closing = self._pinned = False
        self._peers: tuple[Peer, ...] = ()
        self._peers_version = self._sent_version = ""

    async def __aenter__(self) -> Channel:
        if self._link is not None:
            self._running = asyncio.create_task(self._link.run(), name="leader")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def exchange(self, report: Report) -> ReportReply:
        """Send a report, and return the answer. Raises ReportFailed."""
        raise NotImplementedError

    def handle_frame(self, frame: bytes) -> None:
        """A frame of the leader."""
        raise NotImplementedError

    @property
    def is_report_due(self) -> bool:
        """Whether a report is wanted now. A leader that ends waits until it knows that its last
        reply was acted on, and a person waits until it knows the pins. A pod that leaves has no
        time to lose. A list of peers is repeated until the leader knows that it has arrived."""
        new = self._peers_version != self._sent_version
        return self._closing or self._pinned or new or self._leaves() != self._left

    def set_pins(self, pinned: Collection[StepId]) -> None:
        """From now on these steps are pinned, once the leader has said so."""
        self.pins = PinnedSteps(version=self.pins.version + 1, steps=tuple(sorted(pinned)))
        self._pinned = True
        self._changes.ring()

    def take_pushed(self) -> ReportReply | None:
        """The newest reply that came without a report, once."""
        news, self._news = self._news, None
        return None if news is None else self._taken(news)

    def take_reply(self, reply: LeaderReply) -> None:
        """The leader has said something."""
        self._news = reply
        self._changes.ring()

    def _frame(self, report: Report) -> MemberReport:
        self._closing = self._pinned = False
        self._left, self._sent_version = self._leaves(), self._peers_version
        return replace(
            self._sent,
            report=replace(report, peers_version=self._peers_version),
            heard=self._acknowledged,
            pins=self.pins,
            leaving=self._left,
        )

    def _taken(self, leader_reply: LeaderReply) -> ReportReply:
        """What it says, with the list of peers also where that did not change."""
        self._acknowledged, self._closing = leader_reply.number, leader_reply.closing
        if leader_reply.pins.version >= self.pins.version:
            self.pins = leader_reply.pins
        reply, epoch = leader_reply.reply, self._epoch()
        if reply.peers_version == self._peers_version:
            reply = replace(reply, peers=self._peers)
        self._peers, self._peers_version = reply.peers, reply.peers_version
        if epoch is not None and (leader_reply.epoch is None or leader_reply.epoch < epoch):
            return replace(reply, retire=())  # it does not know yet what is dead
        return reply


class OwnChannel(Channel):
    """The leader is in this process. The link finds out whether another one is at its address."""

    address = "this sidecar"

    def __init__(
        self,
        host: Host,
        link: LeaderConnection | None,
        *,
        last: Callable[[], Awaitable[None]],
        **options: Any,
    ) -> None:
        """`last`: called at the end, when the members know all."""
        super().__init__(link, **options)
        self._host, self._last = host, last
        host.own = self.take_reply

    async def __aexit__(self, *_: object) -> None:
        await self._host.wait_for_members(timeout_s=_LAST_WORD_S)
        await super().__aexit__()
        await self._last()
        self._host.close()

    def handle_frame(self, frame: bytes) -> None:
        """A frame of another leader: this one does not answer itself."""

    async def exchange(self, report: Report) -> ReportReply:
        frame = self._frame(report)
        if self._link is not None:
            short = Report(sidecar=report.sidecar, started_at=report.started_at, sequence=0)
            self._link.send(msgspec.json.encode(replace(frame, report=short)))
        try:
            return self._taken(self._host.take_own_report(frame))
        except UsageError as error:
            raise ReportFailed("refused", str(error)) from error


class LinkChannel(Channel):
    """The leader is elsewhere."""

    def __init__(self, link: LeaderConnection, **options: Any) -> None:
        super().__init__(link, **options)
        self._leader, self.address = link, link.address

    def handle_frame(self, frame: bytes) -> None:
        """A frame of the leader."""
        try:
            self.take_reply(_decode(frame))
        except (ValueError, RecursionError) as error:
            _complain("leader.reply_invalid", error=str(error))

    async def exchange(self, report: Report) -> ReportReply:
        link = self._leader

        def is_over() -> bool:
            answered = self._news is not None and self._news.answers >= report.sequence
            return answered or not link.connected

        if not await self._changes.until(lambda: link.connected, timeout_s=_CONNECTED_S):
            raise ReportFailed("connection", link.reason)
        link.send(msgspec.json.encode(self._frame(report)))
        over = await self._changes.until(is_over, timeout_s=_ANSWER_S)
        news = self._news
        if news is None or news.answers < report.sequence:
            raise ReportFailed("connection" if over else "timeout", link.reason or "no answer")
        self._news = None
        return self._taken(news)
