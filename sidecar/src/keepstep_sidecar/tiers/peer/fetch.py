"""Verified bytes of a shard from whoever holds it: another pod, or this one's own copies.

Nothing is believed: root against listing, table against root, each chunk against the table. A pod
that gives other bytes is named, and not asked again for that shard; the next holder goes on with
what is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from keepstep.core.shard import Shard
from keepstep.errors import (
    DigestError,
    ForeignError,
    FormatError,
    ImageError,
    TornError,
    UsageError,
)
from keepstep.image import (
    PAGE_BYTES,
    ControlPage,
    Layout,
    check_chunk,
    check_control,
    check_table,
    chunk_bounds,
)
from keepstep.image.headers import read_length
from keepstep_sidecar.volume.direct_io import for_each_chunk

Wanted = Sequence[tuple[int, memoryview]]
"""Chunk numbers, each with a buffer of exactly its bytes."""

_RUN_CHUNKS = 8
"""Chunks in a row that one request asks for: enough that its round trip does not show."""
_FIRST_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20


class Holder(Protocol):
    """Who can be asked for bytes; one connection."""

    @property
    def name(self) -> str:
        """For people."""

    def range(
        self, remote: Shard, begin: int, end: int
    ) -> AbstractContextManager[Callable[[memoryview], None]]:
        """See `Link.range`."""

    def close(self) -> None:
        """No more requests."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a holder's shard must be: all else is checked against this."""

    layout: Layout
    control: ControlPage
    page: bytes
    table: bytes


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Connections to one holder, for `count` threads."""

    connect: Callable[[], Holder]
    count: int


def know(holder: Holder, remote: Shard, *, run: str) -> Known:
    """Header, table and control page, all checked. Raises StorageError, ImageError."""
    path = f"step {remote.step_id}, rank {remote.rank} from {holder.name}"
    layout = header(holder, remote)
    begin = layout.digests_begin
    data = _read(holder, remote, begin, layout.size_bytes)
    table, page = data[:-PAGE_BYTES], data[-PAGE_BYTES:]
    try:
        control = ControlPage.from_bytes(page)
        check_control(control, layout, run=run, id=remote.step_id)
        if (control.rank, control.world) != (remote.rank, remote.world):
            raise ForeignError(f"is rank {control.rank} of {control.world}")
        if remote.root is not None and control.root != remote.root:
            raise DigestError(f"its root is {control.root}, but {remote.root} was promised")
        check_table(control, layout, table)
    except ImageError as error:
        raise type(error)(error.reason, path=path) from None
    return Known(layout=layout, control=control, page=page, table=table)


def header(holder: Holder, remote: Shard) -> Layout:
    """The shard's header alone. Raises StorageError, ImageError."""
    first = _read(holder, remote, 0, min(_FIRST_BYTES, remote.size_bytes))
    try:
        length = read_length(first)
        if length > remote.size_bytes:
            raise TornError(f"a header of {length} bytes in {remote.size_bytes}")
        if length > len(first):
            first += _read(holder, remote, len(first), length)
        return Layout.parse(first[:length], size_bytes=remote.size_bytes)
    except ImageError as error:
        raise type(error)(error.reason, path=f"{remote.step_id} from {holder.name}") from None


def fetch(known: Known, remote: Shard, wanted: Wanted, streams: Streams) -> None:
    """Fill every buffer, verified, over several connections. Raises StorageError, DigestError.

    When this returns or raises, nobody touches the buffers any more.
    """
    _check_sizes(known.layout, wanted)
    runs = list(_runs(wanted))
    pool = _Pool(streams)

    def fetch_run(index: int) -> None:
        with pool.taken() as holder:
            _fetch_run(holder, known, remote, runs[index])

    try:
        for_each_chunk(fetch_run, len(runs), threads=streams.count)
    finally:
        pool.close()


def _fetch_run(holder: Holder, known: Known, remote: Shard, run: Wanted) -> None:
    layout = known.layout
    begin, end = chunk_bounds(layout, run[0][0])[0], chunk_bounds(layout, run[-1][0])[1]
    path = f"step {remote.step_id}, rank {remote.rank} from {holder.name}"
    with holder.range(remote, begin, end) as fill:
        for chunk, into in run:
            fill(into)
            check_chunk(layout, chunk, into, known.table, path=path)


def load(known: Known, remote: Shard, view: memoryview, streams: Streams) -> None:
    """The whole image into `view`; the seal comes last. Raises what `fetch` does."""
    layout = known.layout
    if len(view) != layout.size_bytes:
        raise UsageError(
            f"step {remote.step_id}: a slot of {len(view)} bytes, not {layout.size_bytes}"
        )
    view[-PAGE_BYTES:] = bytes(PAGE_BYTES)
    places = [chunk_bounds(layout, chunk) for chunk in range(layout.chunk_count)]
    pieces = [view[begin:end] for begin, end in places]
    try:
        fetch(known, remote, list(enumerate(pieces)), streams)
    finally:
        for piece in pieces:
            piece.release()
    if view[: len(layout.header)] != layout.header:
        raise DigestError(
            f"step {remote.step_id}, rank {remote.rank}: another header came than before"
        )
    view[layout.digests_begin : layout.control_begin] = known.table
    view[layout.control_begin :] = known.page


def _check_sizes(layout: Layout, wanted: Wanted) -> None:
    for chunk, into in wanted:
        if not 0 <= chunk < layout.chunk_count:
            raise FormatError(f"chunk {chunk} of {layout.chunk_count}")
        begin, end = chunk_bounds(layout, chunk)
        if len(into) != end - begin:
            raise UsageError(f"chunk {chunk}: a buffer of {len(into)} bytes, not {end - begin}")


def _runs(wanted: Wanted) -> Iterator[Wanted]:
    """Chunks that follow each other, some at a time."""
    run: list[tuple[int, memoryview]] = []
    for one in sorted(wanted, key=lambda one: one[0]):
        if run and (one[0] != run[-1][0] + 1 or len(run) == _RUN_CHUNKS):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _read(holder: Holder, remote: Shard, begin: int, end: int) -> bytes:
    """Memory is taken as bytes arrive, not as they are announced."""
    data = bytearray()
    with holder.range(remote, begin, end) as fill:
        while (left := end - begin - len(data)) > 0:
            piece = bytearray(min(left, _PIECE_BYTES))
            with memoryview(piece) as view:
                fill(view)
            data += piece
    return bytes(data)


class _Pool:
    """Connections that threads take and give back; no more than there are threads."""

    def __init__(self, streams: Streams) -> None:
        self._connect = streams.connect
        self._idle: list[Holder] = []
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[Holder]:
        with self._lock:
            holder = self._idle.pop() if self._idle else None
        holder = holder or self._connect()
        try:
            yield holder
        finally:
            with self._lock:
                self._idle.append(holder)

    def close(self) -> None:
        for holder in self._idle:
            holder.close()
