"""One shard on its way to a buddy: what is missing there, over some connections, sealed last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keepstep.errors import DigestError, StorageError
from keepstep.image import ControlPage, check_chunk, check_control, check_table, chunk_bounds
from keepstep.image.xxh3 import CHUNK_BYTES
from keepstep_sidecar.tiers.peer.client import Link
from keepstep_sidecar.tiers.peer.serve import Reading, Shards
from keepstep_sidecar.volume.direct_io import WRITER_NICENESS, Pace, aligned_buffer, for_each_chunk
from keepstep_sidecar.volume.scan import LocalShard


class Lied(DigestError):
    """The buddy says that it holds other bytes than it was sent."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How to reach one buddy. `count`: connections at once."""

    connect: Callable[[], Link]
    count: int
    pace: Pace


def send(found: LocalShard, shards: Shards, route: Route) -> int:
    """Make `found` durable at the buddy; the bytes that were sent, 0 when it was there already.

    Raises StorageError, DigestError when the shard here is damaged, Lied.
    """
    with shards.open(found.step_id, found.rank, found.world) as reading, route.connect() as link:
        layout = found.layout
        closing = reading.small(layout.digests_begin, layout.size_bytes)
        table = _checked(found, closing, reading)
        begun = link.begin(found, layout.header + closing, size=layout.size_bytes)
        if begun.sealed:
            return 0
        if not set(begun.missing) <= set(range(layout.chunk_count)):
            raise StorageError(f"{link.name} misses chunks that step {found.step_id} does not have")
        sent = _send_chunks(found, table, begun.missing, reading, route)
        sealed = link.seal(found, size=layout.size_bytes)
        if sealed.root != found.root:
            raise Lied(
                f"step {found.step_id}, rank {found.rank}: {link.name} says that its copy has the"
                f" root {sealed.root}, not {found.root}; it gets no copy of this shard again"
            )
        return sent


def _checked(found: LocalShard, closing: bytes, reading: Reading) -> bytes:
    """The digest table, when table and control page are what the scan saw."""
    layout = found.layout
    table = closing[: layout.control_begin - layout.digests_begin]
    control = ControlPage.from_bytes(closing[len(table) :])
    check_control(control, layout, id=found.step_id, path=reading.path)
    check_table(control, layout, table, path=reading.path)
    return table


def _send_chunks(
    found: LocalShard, table: bytes, missing: tuple[int, ...], reading: Reading, route: Route
) -> int:
    layout, crew = found.layout, _Crew(route)
    sizes = [0] * len(missing)

    def put(index: int) -> None:
        chunk = missing[index]
        begin, end = chunk_bounds(layout, chunk)
        with crew.tools() as (link, buffer), buffer[: end - begin] as data:
            reading.read(data, begin)
            # a shard that has rotted here must not travel: the buddy would be blamed for it
            check_chunk(layout, chunk, data, table, path=reading.path)
            route.pace.wait(len(data))
            link.put(found, chunk, data)
            sizes[index] = len(data)

    try:
        for_each_chunk(put, len(missing), threads=route.count, niceness=WRITER_NICENESS)
    finally:
        crew.close()
    return sum(sizes)


class _Crew:
    """A connection and a buffer for each thread; taken and given back."""

    def __init__(self, route: Route) -> None:
        self._connect = route.connect
        self._idle: list[tuple[Link, memoryview]] = []
        self._lock = threading.Lock()

    @contextmanager
    def tools(self) -> Iterator[tuple[Link, memoryview]]:
        with self._lock:
            tools = self._idle.pop() if self._idle else None
        tools = tools or (self._connect(), memoryview(aligned_buffer(CHUNK_BYTES)))
        try:
            yield tools
        finally:
            with self._lock:
                self._idle.append(tools)

    def close(self) -> None:
        for link, buffer in self._idle:
            link.close()
            buffer.release()
