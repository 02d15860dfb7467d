"""A leader and members of a run on loopback: real sockets, real TLS, time-outs of tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from keepstep.errors import UsageError
from keepstep_sidecar.leader.hub import Hub, MemberConnection
from keepstep_sidecar.leader.link import LeaderConnection
from keepstep_sidecar.tiers.peer.member_frames import ConnectionTimeouts
from keepstep_sidecar.tiers.peer.secret import SecretCredentials
from keepstep_sidecar.tiers.peer.server import Server
from keepstep_sidecar.tiers.peer.tls import PodIdentity, TlsContextSource

SECRET = b"a secret of the run, for tests"
QUICK = ConnectionTimeouts(keep_alive_s=0.2, silence_s=2.0, frame_s=2.0)


def credentials(node_rank: int, *, secret: bytes = SECRET, run: str = "gpt") -> SecretCredentials:
    return SecretCredentials(secret, run, node_rank)


class Leader:
    """The leader's side. `frames`: what members sent, in order; `lost`: members whose connection
    has ended."""

    def __init__(
        self, own: TlsContextSource | None = None, *, port: int = 0, **settings: Any
    ) -> None:
        self.frames: list[tuple[MemberConnection, bytes]] = []
        self.lost: list[MemberConnection] = []
        self.answers = True
        self.hub = Hub(self._take, self.lost.append, **settings)
        self._own = own or credentials(0)
        self.server = Server(f"127.0.0.1:{port}", self._own, self._context, join=self.hub.join)
        self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def _take(self, member: MemberConnection, frame: bytes) -> None:
        self.frames.append((member, frame))
        if self.answers:
            member.send(b"re: " + frame[:100])

    def _context(self, sender: PodIdentity) -> Any:
        if not sender.shares_run(self._own.current().identity):
            raise UsageError(f"this is {sender}; here is another run")
        return None

    def bodies(self, node_rank: int = 1) -> list[bytes]:
        return [frame for member, frame in self.frames if member.node_rank == node_rank]

    async def close(self) -> None:
        await asyncio.to_thread(self.server.stop)
        self.hub.close()


class Linked:
    """A member's side. `frames`: what the leader sent."""

    def __init__(
        self,
        address: str,
        own: TlsContextSource | None = None,
        *,
        node_rank: int = 1,
        **settings: Any,
    ) -> None:
        self.frames: list[bytes] = []
        self.changes: list[tuple[bool, str]] = []
        self.link = LeaderConnection(
            address,
            own or credentials(node_rank),
            take=self.frames.append,
            changed=lambda: self.changes.append((self.link.connected, self.link.reason)),
            **settings,
        )


@contextlib.asynccontextmanager
async def running(*linked: Linked) -> AsyncIterator[None]:
    """These links at work."""
    tasks = [asyncio.create_task(member.link.run()) for member in linked]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(exception, asyncio.CancelledError) for exception in ended), ended


@contextlib.asynccontextmanager
async def leading(own: TlsContextSource | None = None, **settings: Any) -> AsyncIterator[Leader]:
    """A leader at work."""
    leader = Leader(own, **settings)
    try:
        yield leader
    finally:
        await leader.close()
