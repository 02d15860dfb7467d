"""A member's connection to the leader of its run: made again whenever it is lost.

Each attempt resolves the name anew, and takes the next of its addresses: a name may come later than
this machine, or lead elsewhere after the leader's pod has moved. The leader is known by its
certificate. The link is connected once the leader has answered: with TLS 1.3 the other side may
still refuse our certificate when our own handshake is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from keepstep.errors import StorageError
from keepstep_sidecar.concurrency import run_on_detached_thread
from keepstep_sidecar.config.sidecar import split_address
from keepstep_sidecar.leader.hub import HELLO_BYTES
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.tiers.peer.member_frames import LIMITS, ConnectionTimeouts, FrameKind, Frames
from keepstep_sidecar.tiers.peer.tls import (
    MEMBERSHIP,
    Tls,
    TlsContextSource,
    explain_tls_error,
    identity_of_peer,
)

T = TypeVar("T")

CONNECT_S: Final = 5.0
_PAUSE_S: Final = (0.1, 2.0)
_LEADER: Final = 0


class LeaderConnection:
    """The connection to the leader at `address`, on the event loop that runs `run`.

    `connected`: frames can be sent. `reason`: why not, for a person; '' while connected.
    `take(frame)` is called for each frame of the leader, `changed()` when `connected` or `reason`
    has changed. What was sent before is lost with the connection: on the next one, the user sends
    everything.
    """

    def __init__(
        self,
        address: str,
        credentials: TlsContextSource,
        *,
        take: Callable[[bytes], None],
        changed: Callable[[], None],
        connect_s: float = CONNECT_S,
        limits: ConnectionTimeouts = LIMITS,
    ) -> None:
        """`address`: `host:port`. Raises UsageError. `connect_s`: the longest time that each part
        of connecting takes."""
        self.address = address
        self.connected = False
        self.reason = "not connected yet"
        self._host, self._port = split_address(address)
        self._credentials = credentials
        self._take, self._changed = take, changed
        self._connect_s, self._limits = connect_s, limits
        self._sidecar = os.urandom(HELLO_BYTES)
        self._failures = 0
        self._frames: Frames | None = None

    def send(self, frame: bytes) -> bool:
        """Send a frame, in place of one that still waits. False if that is not possible now."""
        if self.connected and self._frames is not None:
            self._frames.send(frame)
        return self.connected

    async def run(self) -> None:
        """Connect, and again after each loss, until cancelled."""
        pause_s = _PAUSE_S[0]
        while True:
            try:
                reason = await self._once()
            except Exception as error:  # of any kind: without the leader nothing is committed
                reason = str(error) or repr(error)
            if self.connected:
                pause_s = _PAUSE_S[0]
            self._is(connected=False, reason=f"the leader at {self.address}: {reason}")
            self._failures += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    def _is(self, *, connected: bool, reason: str) -> None:
        if (connected, reason) == (self.connected, self.reason):
            return
        self.connected, self.reason = connected, reason
        if connected:
            info("leader.connected", address=self.address)
        else:
            warn("leader.disconnected", error=reason)
        self._changed()

    # --- one connection ----------------------------------------------------------------------

    async def _once(self) -> str:
        """Connect, and return why the connection ended."""
        tls = self._credentials.current()
        secure = await self._secured(tls)
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._frames = frames = Frames(
            secure,
            take=self._received,
            ended=lambda reason: None if ended.done() else ended.set_result(reason),
            explain=lambda error: explain_tls_error(error, tls.remedy),
            limits=self._limits,
        )
        try:
            frames.send(self._sidecar, FrameKind.HELLO)
            return await ended
        finally:
            frames.close()

    def _received(self, kind: FrameKind, body: bytes) -> None:
        self._is(connected=True, reason="")
        if body:
            self._take(body)

    async def _secured(self, tls: Tls) -> ssl.SSLSocket:
        """A connection whose other side is the leader."""
        family, address = await self._resolved()
        loop, where = asyncio.get_running_loop(), f"port {self._port} of {address[0]}"
        plain = self._socket(family)
        with contextlib.ExitStack() as undo:
            undo.callback(plain.close)
            try:
                why = f"no answer of {where}: it is not there, or a firewall drops the connection"
                await self._in_time(loop.sock_connect(plain, address), why)
                secure = tls.member.wrap_socket(plain, do_handshake_on_connect=False)
                undo.callback(secure.close)
                why = f"{where} takes the connection, but no TLS: is it keepstep's?"
                await self._in_time(_shake_hands(secure), why)
            except OSError as error:
                raise StorageError(f"{where}: {explain_tls_error(error, tls.remedy)}") from error
            self._check(secure, tls)
            undo.pop_all()
            return secure

    def _socket(self, family: int) -> socket.socket:
        plain = socket.socket(family, socket.SOCK_STREAM)
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain

    async def _resolved(self) -> tuple[int, Any]:
        def resolve() -> list[Any]:
            return socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)

        try:
            found = await self._in_time(
                run_on_detached_thread(resolve, "resolve"), "no name server answers"
            )
        except (OSError, UnicodeError) as error:
            raise StorageError(
                f"the name does not resolve (yet): {explain_tls_error(error)}"
            ) from error
        family, *_, address = found[self._failures % len(found)]
        return family, address

    async def _in_time(self, work: Awaitable[T], why: str) -> T:
        try:
            async with asyncio.timeout(self._connect_s):
                return await work
        except TimeoutError:
            raise StorageError(f"{why} (after {self._connect_s:g} s)") from None

    def _check(self, secure: ssl.SSLSocket, tls: Tls) -> None:
        who = identity_of_peer(secure.getpeercert(), whose=self.address)
        if not who.shares_run(tls.identity):
            raise StorageError(f"there is {who}, and here is {tls.identity}: another run")
        if who.node_rank != _LEADER:
            raise StorageError(f"there is {who}, and node rank {_LEADER} leads the run")
        if secure.selected_alpn_protocol() != MEMBERSHIP:
            raise StorageError("the sidecar there knows no members: its version is older than this")


async def _shake_hands(secure: ssl.SSLSocket) -> None:
    """What a client sends fits into the socket's buffer: only reading waits."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(ssl.SSLWantReadError):
            return secure.do_handshake()
        readable = asyncio.Event()
        loop.add_reader(secure, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(secure)
