"""The leader's side of its members' connections.

The peers' server shakes hands on a thread, checks the certificate, and hands the connection over to
the event loop: 2,048 members cost no 2,048 threads. Members do not count among its 128 peers; there
are at most two for each node rank of the run. Two only while it is not known which of them is the
place's sidecar: the old one may be lost, or there may be two pods with one node rank.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from typing import Final

from keepstep_sidecar.log import RareWarning
from keepstep_sidecar.tiers.peer.member_frames import LIMITS, ConnectionTimeouts, FrameKind, Frames
from keepstep_sidecar.tiers.peer.tls import PodIdentity, explain_tls_error

HELLO_BYTES: Final = 16
_MOST_NODES: Final = 4096
_MOST_OF_A_NODE: Final = 2

_complain = RareWarning()


class MemberConnection:
    """One connection of a member, that of the sidecar at `address`."""

    def __init__(
        self, hub: Hub, secure: ssl.SSLSocket, identity: PodIdentity, address: str
    ) -> None:
        self.identity, self.address = identity, address
        self.sidecar = b""
        self._hub = hub
        self._frames = Frames(
            secure,
            take=self._take,
            ended=lambda reason: hub.leave(self, reason),
            explain=explain_tls_error,
            limits=hub.limits,
        )

    def __str__(self) -> str:
        return f"node rank {self.node_rank} ({self.address})"

    @property
    def node_rank(self) -> int:
        """As its certificate says."""
        return self.identity.node_rank

    @property
    def quiet_s(self) -> float:
        """For how long nothing was heard. Beyond `ConnectionTimeouts.keep_alive_s` it is likely
        lost."""
        return self._frames.quiet_s

    def send(self, frame: bytes) -> None:
        """Send a frame, in place of one that still waits. Never blocks, and never raises."""
        self._frames.send(frame)

    def refuse(self, reason: str) -> None:
        """Tell the member why, then close its connection. Nothing is taken from it any more."""
        self._frames.refuse(reason)

    def close(self, reason: str) -> None:
        """Close the connection at once."""
        self._frames.close(reason)

    def _take(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.HELLO and not self.sidecar and len(body) == HELLO_BYTES:
            self.sidecar = body
            self._hub.enter(self)
        elif kind is not FrameKind.MESSAGE or not self.sidecar:
            self.refuse("a member says hello once, before all else")
        elif body:
            self._hub.take(self, body)


class Hub:
    """All members of a run, on the event loop on which it is made.

    `take(member, frame)`: a member has sent a frame. `gone(member)`: its connection has ended;
    called once for each member that was connected, also after `MemberConnection.refuse`. A new
    connection replaces an earlier one of the same sidecar, or one that has missed a sign of life.
    Otherwise the user has two members of one node rank, and decides which to refuse.
    """

    def __init__(
        self,
        take: Callable[[MemberConnection, bytes], None],
        gone: Callable[[MemberConnection], None],
        *,
        nodes: int | None = None,
        limits: ConnectionTimeouts = LIMITS,
    ) -> None:
        """`nodes`: how many the run has, so that node ranks are lower. None: they are any numbers,
        as in pods, of at most 4,096 machines."""
        self.take, self.limits = take, limits
        self._gone = gone
        self._nodes = nodes
        self._loop = asyncio.get_running_loop()
        self._arriving: dict[int, MemberConnection] = {}
        self._members: dict[int, list[MemberConnection]] = {}
        self._closed = False

    def __iter__(self) -> Iterator[MemberConnection]:
        """All that are connected."""
        for members in list(self._members.values()):
            yield from list(members)

    def join(self, secure: ssl.SSLSocket, identity: PodIdentity, address: str) -> None:
        """Take over the connection of a pod of this run; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._arrive, secure, identity, address)
        except RuntimeError:  # the loop is closed
            secure.close()

    def close(self) -> None:
        """Close all connections, and take no others."""
        self._closed = True
        for member in (*self._arriving.values(), *self):
            member.close("the leader ends")

    # --- members come and go -----------------------------------------------------------------

    def _arrive(self, secure: ssl.SSLSocket, identity: PodIdentity, address: str) -> None:
        if self._closed:
            return secure.close()
        member = MemberConnection(self, secure, identity, address)
        rank = identity.node_rank
        if self._nodes is not None and rank >= self._nodes:
            return member.refuse(f"the run has {self._nodes} nodes at most")
        if self._nodes is None and self._is_full(rank):
            return member.refuse(f"a run has {_MOST_NODES} nodes at most")
        before = self._arriving.get(rank)
        if before is not None:
            before.close("a newer connection replaced it before its first message")
        self._arriving[rank] = member
        return None

    def _is_full(self, rank: int) -> bool:
        """Whether a node rank that was not here before is one too many."""
        count = len(self._arriving) + len(self._members)
        return count >= _MOST_NODES and len({*self._arriving, *self._members, rank}) > _MOST_NODES

    def enter(self, member: MemberConnection) -> None:
        """It has said hello."""
        rank = member.node_rank
        if self._arriving.get(rank) is member:
            del self._arriving[rank]
        for other in list(self._members.get(rank, ())):
            if other.sidecar == member.sidecar or other.quiet_s > 1.5 * self.limits.keep_alive_s:
                reason = "the member has connected again"
                self.leave(other, reason)
                other.close(reason)
        members = self._members.setdefault(rank, [])
        if len(members) >= _MOST_OF_A_NODE:
            where = " and ".join(member.address for member in members)
            return member.refuse(f"sidecars at {where} have the same node rank, {rank}")
        members.append(member)
        member.send(b"")
        return None

    def leave(self, member: MemberConnection, reason: str) -> None:
        """Its connection has ended."""
        rank = member.node_rank
        if self._arriving.get(rank) is member:
            del self._arriving[rank]
        members = self._members.get(rank, [])
        if member in members:
            members.remove(member)
            if not members:
                del self._members[rank]
            _complain("leader.member_lost", member=str(member), reason=reason)
            self._gone(member)
