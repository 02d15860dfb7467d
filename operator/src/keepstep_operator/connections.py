"""Limits how many connections one source, and all sources, may hold open without a request.

Anyone who reaches a port can open connections, and each takes a twentieth of a MiB of TLS buffers.
So a connection is counted before its handshake, and then has a few seconds until the end of its
first request's head; until then it is young. If a source has too many young connections, its next
ones wait for a while as bare sockets. Half of the places are kept for the first connection of each
source, so that a few sources never have them all.

Connections that have sent a request are allowed in the number that clients need: an API server
keeps one for each review under way.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

HEAD_S: Final = 4.0
"""The time from the start of the handshake to the end of the first request's head."""
SERVED: Final = 256
"""How many connections are served at a time, if each brings one request and ends with its answer.
After an upgrade all sidecars of a cluster come together, with everything they know. Each connection
then takes a fifth of a MiB; those that wait as bare sockets take nothing."""
WAIT_S: Final = 15.0
"""The longest wait of a connection before its handshake."""
YOUNG_OF_A_SOURCE: Final = 32
YOUNG: Final = 512
MOST_OF_A_SOURCE: Final = 384
MOST: Final = 16_384
_END_OF_HEAD: Final = b"\r\n\r\n"

sslproto.SSLProtocol.max_size = 32 << 10
"""By default asyncio gives each TLS connection a buffer of 256 KiB; a record has at most 16 KiB."""


class Limits:
    """The limits of one listener. `serve`: makes the protocol that answers requests. `one_request`:
    each connection ends with an answer, and keeps its place until then. `of_a_source`: the most
    places of one source."""

    def __init__(
        self,
        serve: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        *,
        head_s: float = HEAD_S,
        one_request: bool = False,
        of_a_source: int = YOUNG_OF_A_SOURCE,
    ) -> None:
        self.serve = serve
        self.one_request = one_request
        self._places = SERVED if one_request else YOUNG
        self._of_a_source = of_a_source
        self.context = context
        self.head_s = head_s
        self._young: Counter[str] = Counter()
        self._young_of_all = 0
        self._open: dict[_Gate, None] = {}
        self._open_of: Counter[str] = Counter()
        self._waiting: dict[str, dict[_Gate, None]] = {}
        self._ended = False

    def __call__(self) -> asyncio.Protocol:
        return _Gate(self)

    def admit(self, gate: _Gate) -> bool:
        """Returns whether the connection may stay open. It begins at once, or when its turn
        comes."""
        crowded = self._open_of[gate.source] >= MOST_OF_A_SOURCE or len(self._open) >= MOST
        if self._ended or crowded:
            return False
        self._open[gate] = None
        self._open_of[gate.source] += 1
        self._waiting.setdefault(gate.source, {})[gate] = None
        self._begin()
        return True

    def grown(self, source: str) -> None:
        """A young connection of this source has sent its request, or is gone: the next one may
        begin."""
        _one_less(self._young, source)
        self._young_of_all -= 1
        self._begin()

    def ended(self, gate: _Gate) -> None:
        """An admitted connection is closed."""
        del self._open[gate]
        _one_less(self._open_of, gate.source)
        waiting = self._waiting.get(gate.source, {})
        waiting.pop(gate, None)
        if not waiting:
            self._waiting.pop(gate.source, None)

    def end_all(self) -> None:
        """The listener is closed: abort all connections, also those in a handshake, those whose TLS
        shutdown a client does not answer, and those that were accepted just before."""
        self._ended = True
        for gate in [*self._open]:
            gate.abort()

    def _begin(self) -> None:
        while self._young_of_all < self._places and (source := self._next()):
            waiting = self._waiting[source]
            gate = next(iter(waiting))
            del waiting[gate]
            if not waiting:
                del self._waiting[source]
            self._young[source] += 1
            self._young_of_all += 1
            gate.begin()

    def _next(self) -> str:
        """The source whose turn it is: one without a young connection, otherwise the one with the
        fewest while half of the places are free; '' if all must wait. Only as many sources as there
        are places have a young connection, so the loop looks at few."""
        found, fewest = "", self._of_a_source
        crowded = self._young_of_all >= self._places // 2
        for source in self._waiting:
            young = self._young[source]
            if not young:
                return source
            if young < fewest and not crowded:
                found, fewest = source, young
        return found


def _one_less(counter: Counter[str], source: str) -> None:
    counter[source] -= 1
    if counter[source] <= 0:
        del counter[source]


class _Gate(asyncio.Protocol):
    """The protocol before the one that answers: counts, does the TLS handshake, and passes all data
    on."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._inner: asyncio.Protocol | None = None
        self.source = ""
        self._transport: Any = None
        self._admitted = self._young = False
        self._tail = b""
        self._early: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._lost = False

    def connection_made(self, transport: Any) -> None:
        self.source = str((transport.get_extra_info("peername") or ("?",))[0])
        self._transport = transport
        transport.pause_reading()
        self._timer = asyncio.get_running_loop().call_later(WAIT_S, transport.abort)
        self._admitted = self._limits.admit(self)
        if not self._admitted:
            self._lost = True
            self._end()
            transport.abort()

    def begin(self) -> None:
        """The connection's turn has come: its time starts now."""
        self._young = True
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.head_s, self._transport.abort)
        if self._limits.context is not None:
            work = self._shake_hands(self._transport, self._limits.context)
            self._handshake = loop.create_task(work)
        else:
            self._attach(self._transport)
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()

    async def _shake_hands(self, transport: Any, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=self._limits.head_s,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, ssl.SSLError):  # a probe, or a client that does not trust us
            transport.abort()
            self._end()
            return
        if secured is not None and not self._lost:
            # beyond this, unread data stays with the sender
            secured.set_read_buffer_limits(sslproto.SSLProtocol.max_size)  # type: ignore[attr-defined]
            self._attach(secured)

    def _attach(self, transport: Any) -> None:
        self._inner = self._limits.serve()
        self._inner.connection_made(transport)
        for data in self._early:
            self._inner.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._young:
            self._tail += data
            if _END_OF_HEAD in self._tail:
                self._asked()
            self._tail = self._tail[-3:]
        if self._inner is None:
            self._early.append(data)
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._end()
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def _end(self) -> None:
        # asyncio's transport refers to itself by this method, so only the garbage collector would
        # free a closed connection
        vars(self._transport).pop("_read_ready_cb", None)
        self._grow()
        if self._admitted:
            self._admitted = False
            self._limits.ended(self)

    def _asked(self) -> None:
        self._stop_timer()
        if not self._limits.one_request:
            self._grow()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _grow(self) -> None:
        self._stop_timer()
        if self._young:
            self._young = False
            self._limits.grown(self.source)
