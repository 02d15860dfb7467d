"""Limits how many strangers are connected to a port that the whole cluster reaches, and how long.

A *stranger* has not yet shown who it is. Its connection costs the sidecar a descriptor, memory and
perhaps a thread, and costs the stranger nothing. So strangers have few places, for a few seconds
each. When places run out, a new stranger takes that of the oldest one: of its own address if that
has used up its share, else of the address with the most connections. So holding connections cannot
block a port, and descriptors remain for the trainers' socket and the volumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from keepstep_sidecar.log import RareWarning

C = TypeVar("C", bound=Hashable)

ACCEPT_PAUSE_S: Final = 0.01
"""The pause after a connection took another one's place. It keeps a flood from using up the
processor. A new stranger has this time, multiplied by the number of places, to show who it is."""
FAILED_PAUSE_S: Final = 0.2
"""The pause after a connection could not be accepted, mostly for lack of descriptors."""
_SWEEP_S: Final = 0.5
_BACKLOG: Final = 64

_complain = RareWarning()


@dataclass(frozen=True)
class _Place:
    source: str
    since: float


class UnauthenticatedConnections(Generic[C]):
    """At most `most` strangers, `most_each` of one address, each for `seconds`. Thread-safe.

    `close` ends a connection and must not block.
    """

    def __init__(
        self, close: Callable[[C], None], *, most: int, most_each: int, seconds: float
    ) -> None:
        self._close = close
        self._most, self._most_each, self._seconds = most, most_each, seconds
        self._places: dict[C, _Place] = {}  # in the order in which they came
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether the next stranger takes another one's place, whatever its address."""
        return len(self._places) >= self._most

    def admit_with_eviction(self, connection: C, source: str) -> bool:
        """Give `connection` from address `source` a place. True if another one lost its place."""
        with self._lock:
            doomed = self._doomed(source)
            self._places[connection] = _Place(source, time.monotonic())
        return self._end(doomed)

    def _doomed(self, source: str) -> list[C]:
        counts = Counter(place.source for place in self._places.values())
        if counts[source] >= self._most_each:
            crowded = source
        elif len(self._places) >= self._most:
            crowded = counts.most_common(1)[0][0]
        else:
            return []
        return [
            next(
                connection for connection, place in self._places.items() if place.source == crowded
            )
        ]

    def leave(self, connection: C) -> bool:
        """The connection has ended, or is no longer a stranger. Returns False if it had already
        lost its place."""
        with self._lock:
            return self._places.pop(connection, None) is not None

    def remove_closed(self, gone: Callable[[C], bool]) -> None:
        """Remove connections that ended by themselves, where no code calls `leave`."""
        with self._lock:
            for connection in [place for place in self._places if gone(place)]:
                del self._places[connection]

    def end_overdue(self) -> None:
        """End the connections whose time is over."""
        before = time.monotonic() - self._seconds
        with self._lock:
            doomed = [
                connection for connection, place in self._places.items() if place.since < before
            ]
        self._end(doomed)

    def end_all(self) -> None:
        """End all connections."""
        with self._lock:
            doomed = list(self._places)
        self._end(doomed)

    def _end(self, doomed: list[C]) -> bool:
        for connection in doomed:
            if self.leave(connection):
                self._close(connection)
        return bool(doomed)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard limit. The usual 1024 is meant for programs
    that use select(); the sidecar has a descriptor for each slot, file and connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_on_all(port: int) -> socket.socket:
    """Listen on all addresses, of both families if there are both. Raises OSError."""
    with contextlib.suppress(OSError):
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


async def serve_connections(
    protocol: Callable[[], asyncio.Protocol],
    listening: socket.socket,
    strangers: UnauthenticatedConnections[asyncio.Transport],
) -> None:
    """Give each incoming connection a protocol and a place, until cancelled. Clients that speak
    plain HTTP stay strangers."""
    listening.setblocking(False)
    sweeping = asyncio.create_task(_sweep(strangers), name="end overdue connections")
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                plain, address = await loop.sock_accept(listening)
                transport, _ = await loop.connect_accepted_socket(protocol, plain)
            except OSError as error:
                _complain("api.accept_failed", error=str(error))
                await asyncio.sleep(FAILED_PAUSE_S)
                continue
            strangers.remove_closed(lambda transport: transport.is_closing())
            if strangers.admit_with_eviction(transport, str(address[0])):
                await asyncio.sleep(ACCEPT_PAUSE_S)
    finally:
        sweeping.cancel()
        strangers.end_all()


async def _sweep(strangers: UnauthenticatedConnections[asyncio.Transport]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        strangers.end_overdue()
