"""Hosts the run's leader: takes frames in, and replies to members with news."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from keepstep.core.ledger import Alarm
from keepstep.errors import UsageError
from keepstep.leader.leader import Leader
from keepstep.wire.member_reports import LeaderReply, MemberReport
from keepstep.wire.run_reports import LeaderAnswer
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.config.sidecar import split_address
from keepstep_sidecar.log import warn

if TYPE_CHECKING:
    from keepstep_sidecar.leader.hub import MemberConnection

OWN = 0
"""The node rank of the leader itself."""
_TOGETHER_S, _TOGETHER_EACH_S = 0.15, 0.0025
"""Reports that come within this time, at most and for each member, are taken in and answered
together: all ranks write a step at once, and each report alone would cost half as much again."""
_ANSWER_S = 0.4
"""An answer that says no more than that a report has come waits this long for the next commit: half
of all replies are such answers, and each is a frame of its own."""
_PART = 8
"""Answering takes at most one part in so many of the time, in a large run."""
_ANYWHERE = ("", "0.0.0.0", "::")
_REFUSED_S = 60.0
"""How long a refused member is shown."""

_ABSENT_S = 10.0
"""How long a member is looked for before a person is told: restarts are ordinary."""

_decode = msgspec.json.Decoder(MemberReport).decode


class Host:
    """On one event loop. `own`: is given what the leader's own sidecar is to be told without being
    asked. `alarmed`: is given what a person should look at."""

    def __init__(self, leader: Leader, changes: ChangeNotifier) -> None:
        self.leader = leader
        self.own: Callable[[LeaderReply], None] = lambda reply: None
        self.alarmed: Callable[[Alarm], None] = lambda alarm: None
        self._changes = changes
        self._members: dict[int, MemberConnection] = {}
        self._refused: dict[int, tuple[float, str]] = {}
        self._missing: dict[int, float] = {}
        self._due: asyncio.TimerHandle | None = None
        self._answers: asyncio.TimerHandle | None = None
        self._patient = True
        self._pending: dict[MemberConnection, bytes] = {}
        self._silent_until = 0.0

    # --- frames ------------------------------------------------------------------------------

    def take_own_report(self, report: MemberReport) -> LeaderReply:
        """The report of this machine. Raises UsageError."""
        self.leader.take(OWN, report, at=time.time())
        self._settle()
        reply = self.leader.news(OWN)
        assert reply is not None, "each report has an answer"
        if self._members:
            self._soon()
        return reply

    def receive_member_frame(self, member: MemberConnection, frame: bytes) -> None:
        """A frame of a member."""
        before = self._pending.pop(member, None)
        if before is None or self._take_in(member, before):
            self._pending[member] = frame
            self._soon()

    def _take_in(self, member: MemberConnection, frame: bytes) -> bool:
        """Returns False if it is refused."""
        try:
            member_report = _decode(frame)
            if member.node_rank == OWN:
                # this sidecar itself, which looks who is at its address
                self.leader.reject_duplicate_leader(member_report)
                return True
            report = member_report.report
            address = _reachable(report.peer_address, member.address)
            if address != report.peer_address:
                member_report = replace(member_report, report=replace(report, peer_address=address))
            self.leader.take(member.node_rank, member_report, at=time.time())
        except (UsageError, ValueError, RecursionError) as error:
            self._refuse(member, str(error))
            return False
        except Exception as error:  # others have sent reports, too
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a report of {member}", "exception": error}
            )
            member.close("an error here")
            return False
        self._members[member.node_rank] = member
        self._refused.pop(member.node_rank, None)
        return True

    def _settle(self) -> None:
        for alarm in self.leader.draw_conclusions(at=time.time()):
            self.alarmed(alarm)

    def _refuse(self, member: MemberConnection, reason: str) -> None:
        now = time.monotonic()
        if self._refused.get(member.node_rank, (0.0, ""))[1] != reason:
            warn("leader.member_refused", member=str(member), reason=reason)
        self._refused[member.node_rank] = now, reason
        member.refuse(reason)
        self._changes.ring()

    def handle_disconnect(self, member: MemberConnection) -> None:
        """A connection has ended."""
        if (frame := self._pending.pop(member, None)) is not None:
            self._take_in(member, frame)
        if self._members.get(member.node_rank) is member:
            del self._members[member.node_rank]
            self.leader.left(member.node_rank)
            self._soon()

    # --- the operator ------------------------------------------------------------------------

    def answered(self, answer: LeaderAnswer) -> None:
        """The operator has answered a report of the run."""
        self.leader.handle_operator_answer(answer, at=time.time())
        self._settle()
        self._soon()

    def run_periodic_checks(self) -> None:
        """Called every second or so: what becomes true by waiting."""
        changed = self.leader.advance_clock(at=time.time())
        self._settle()
        if changed:
            self._soon()

    # --- replies -----------------------------------------------------------------------------

    def _soon(self) -> None:
        if self._due is None:
            together_s = min(_TOGETHER_S, _TOGETHER_EACH_S * len(self._members))
            self._due = asyncio.get_running_loop().call_later(together_s, self._act)

    def _act(self) -> None:
        self._due = None
        self._take_pending()
        if time.monotonic() < self._silent_until:
            self._soon()
        else:
            self._publish()

    def _take_pending(self) -> None:
        pending, self._pending = self._pending, {}
        for member, frame in pending.items():
            self._take_in(member, frame)
        if pending:
            self._settle()

    def _publish(self) -> None:
        began, patient, self._patient = time.monotonic(), self._patient, True
        for rank in self.leader.list_members_with_news(patient=patient):
            member, reply = self._members.get(rank), self.leader.news(rank)
            if reply is None:
                continue
            if member is not None:
                member.send(msgspec.json.encode(reply))
            elif rank == OWN:
                self.own(reply)
        now = time.monotonic()
        self._silent_until = now + _PART * (now - began)
        if self._answers is not None and not self.leader.owes_answer:
            self._answers.cancel()
            self._answers = None
        elif self._answers is None and self.leader.owes_answer:
            self._answers = asyncio.get_running_loop().call_later(_ANSWER_S, self._answer)
        self._changes.ring()

    def _answer(self) -> None:
        self._answers, self._patient = None, False
        self._soon()

    async def wait_for_members(self, *, timeout_s: float) -> None:
        """Return when all members have acted on what the leader knows, or after `timeout_s`."""
        self._take_pending()
        self.leader.closing, self._patient = True, False
        self._publish()
        await self._changes.until(self.leader.have_members_acknowledged_end, timeout_s=timeout_s)

    def close(self) -> None:
        """Stop sending replies."""
        for timer in (self._due, self._answers):
            if timer is not None:
                timer.cancel()

    def warnings(self) -> Iterator[str]:
        """What a person has to mend."""
        now, missing = time.monotonic(), self.leader.list_unconnected_node_ranks()
        self._missing = {rank: self._missing.get(rank, now) for rank in missing}
        if long := [rank for rank, since in self._missing.items() if now - since >= _ABSENT_S]:
            names = ", ".join(map(str, long))
            yield f"no connection from node ranks {names}: no step is deleted until all are there"
        for at, reason in self._refused.values():
            if now - at < _REFUSED_S:
                yield reason


def _reachable(address: str, seen: str) -> str:
    """The address at which other machines find a member that listens everywhere: it came from
    there. '' if it serves nothing."""
    if not address:
        return ""
    host, port = split_address(address)
    if host not in _ANYWHERE:
        return address
    host = split_address(seen)[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
