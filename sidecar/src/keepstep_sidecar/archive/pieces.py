"""A local shard on its way out: piece by piece, verified, through a few buffers that never grow.

The file is read with O_DIRECT rather than mapped: a mapped page that the drive cannot read ends
the process (SIGBUS), and gigabytes of page cache would be taken from the training. The drive
writes into the buffer that the network reads from; nothing is copied in between. What does not
fit its digest does not leave: an archive must not keep rotten bytes as if they were good.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from keepstep.digests import CHUNK_BYTES
from keepstep.errors import StorageError
from keepstep.image import ControlPage, Layout, check_chunk, check_table, chunk_bounds
from keepstep_sidecar.archive.threads import blocking
from keepstep_sidecar.engine import aligned_buffer
from keepstep_sidecar.filesystem import Filesystem
from keepstep_sidecar.scan import Found, read_sealed

MOST_PARTS = 9000
"""S3 takes 10,000 parts an object."""


class Gone(StorageError):
    """The shard was retired meanwhile: there is nothing to send, and nothing wrong."""


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """An open, sealed shard; `tail`: its digest table and control page, checked."""

    fd: int
    path: Path
    layout: Layout
    control: ControlPage
    tail: bytes

    @property
    def table(self) -> memoryview:
        return memoryview(self.tail)[: self.layout.control_begin - self.layout.digests_begin]

    @property
    def part_bytes(self) -> int:
        """The size of a part: whole chunks, few enough for an object of this size."""
        chunks = -(-self.layout.size_bytes // CHUNK_BYTES)
        return -(-chunks // MOST_PARTS) * CHUNK_BYTES

    def read_piece(self, index: int, into: memoryview) -> None:
        """Piece `index`: the bytes from its chunk on. Raises DigestError, StorageError."""
        try:
            got = Filesystem().read(self.fd, into, index * CHUNK_BYTES)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot read: {error}; use another copy") from error
        if got < len(into):
            raise StorageError(f"{self.path}: it ends early; use another copy")
        begin, end = chunk_bounds(self.layout, index)
        if begin < end:
            with into[: end - begin] as chunk:
                check_chunk(self.layout, index, chunk, self.table, path=self.path)


@contextlib.contextmanager
def opened(found: Found) -> Iterator[LocalShard]:
    """Open a shard wherever it is by now. Raises Gone, ImageError, StorageError."""
    path = _path(found)
    try:
        with path.open("rb") as file:
            layout, control = read_sealed(file.fileno(), path, run=found.run)
            size = layout.size_bytes - layout.digests_begin
            tail = os.pread(file.fileno(), size, layout.digests_begin)
        fd = _open_direct(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error}; use another copy") from error
    try:
        shard = LocalShard(fd=fd, path=path, layout=layout, control=control, tail=tail)
        check_table(control, layout, shard.table, path=path)
        yield shard
    finally:
        os.close(fd)


def _path(found: Found) -> Path:
    """A step that was published since has moved out of `pending/`."""
    published = found.path.parents[2] / str(found.id) / found.path.name
    for path in (found.path, published):
        if path.exists():
            return path
    raise Gone(f"{found.path} was retired before it could be sent")


def _open_direct(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


class Buffers:
    """Page-aligned buffers of one chunk. One comes back when nobody refers to its view any more,
    which may be a thread of the network's: so there are never more than `count`."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = [aligned_buffer(size_bytes) for _ in range(count)]
        self._freed = asyncio.Event()

    async def take(self, size_bytes: int) -> memoryview:
        """The first `size_bytes` of a free buffer, when there is one."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        buffer = self._free.pop()
        view = memoryview(buffer)[:size_bytes]
        weakref.finalize(view, self._dropped, buffer).atexit = False
        return view

    def _dropped(self, buffer: mmap.mmap) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody needs it any more
            self._loop.call_soon_threadsafe(self._back, buffer)

    def _back(self, buffer: mmap.mmap) -> None:
        self._free.append(buffer)
        self._freed.set()


async def pieces(
    shard: LocalShard, *, parts: int, executor: Executor
) -> AsyncGenerator[memoryview, None]:
    """The whole file in order; `parts`: how many parts the receiver keeps in flight.

    Raises DigestError, StorageError: what was given before must then not become an object.
    """
    size = shard.layout.size_bytes
    total = -(-size // CHUNK_BYTES)
    count = min((parts + 1) * (shard.part_bytes // CHUNK_BYTES) + 1, total)
    buffers = Buffers(count, min(CHUNK_BYTES, size))

    async def read(index: int) -> memoryview:
        view = await buffers.take(min(CHUNK_BYTES, size - index * CHUNK_BYTES))
        await blocking(executor, lambda: shard.read_piece(index, view))
        return view

    ahead = asyncio.ensure_future(read(0))  # the drive works while the network does
    try:
        for index in range(total):
            view = await ahead
            if index + 1 < total:
                ahead = asyncio.ensure_future(read(index + 1))
            yield view
            del view  # else this frame would hold a buffer while it waits for a free one
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)
