"""One shard file: writes a slot's image with its seal, and reads an image back.

A seal means that everything before it is in place. So the seal (the control page) is the last thing
that reaches a file or a slot. The module `volume` is responsible for names and directories.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.image import (
    ControlPage,
    Layout,
    chunk_bounds,
    seal_for_disk,
)
from keepstep.image.manifest import Manifest
from keepstep.image.xxh3 import xxh3_128
from keepstep_sidecar.concurrency import for_each_chunk
from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.direct_io import (
    WRITER_NICENESS,
    Engine,
    RateLimit,
    aligned_buffer,
    hashing,
)
from keepstep_sidecar.volume.filesystem import Filesystem

Copied = Callable[[int], bool]
"""Waits until so many bytes, from the beginning of an image, are in place for good. False when it
gives up."""


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """An open file of one image. The code that opened `fd` closes it."""

    filesystem: Filesystem
    fd: int
    threads: int

    def allocate(self, layout: Layout) -> None:
        """Make room for the whole image. Raises OSError."""
        faults.point("write.allocate")
        self.filesystem.allocate(self.fd, layout.size_bytes)

    def write_copied(
        self, view: memoryview, layout: Layout, copied: Copied, pace: RateLimit
    ) -> Collection[int]:
        """Write chunks of an image that is still being copied into `view`, as soon as they are in
        place, until `copied` gives up. Returns the chunks that were written. Raises OSError.

        Nothing is hashed here: it would take time from the copy, and digests must be of the bytes
        that the seal vouches for.
        """
        written, turn, over = set[int](), threading.Lock(), threading.Event()
        indexes = iter(range(layout.chunk_count))

        def write_chunk(_: int) -> None:
            with turn:  # so one thread at a time asks how far the copy is, and for the first chunk
                index = next(indexes)
                begin, end = chunk_bounds(layout, index)
                if over.is_set() or not copied(end):
                    over.set()
                    return
            pace.wait(end - begin)
            self._write(view, begin, end)
            written.add(index)

        for_each_chunk(
            write_chunk, layout.chunk_count, threads=self.threads, niceness=WRITER_NICENESS
        )
        return written

    def write(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        pace: RateLimit,
        *,
        there: Collection[int] = (),
    ) -> Manifest:
        """Write the image in `view` with its digests, and seal it. Chunks that are `there` are only
        hashed. Raises OSError."""
        digests = self._write_data(view, layout, pace, there)
        written = replace(control, written_at=time.time())
        table, seal = seal_for_disk(layout, view, written, digests=digests)
        control = ControlPage.from_bytes(seal)
        manifest = Manifest(layout=layout, control=control, closing=table + seal)
        faults.point("write.table")
        seal_file(self.filesystem, self.fd, manifest, phase="write")
        return manifest

    def _write_data(
        self, view: memoryview, layout: Layout, pace: RateLimit, there: Collection[int]
    ) -> list[bytes]:
        """Write the chunks that are not `there`; returns the digests of all."""
        digests, turn = [b""] * layout.chunk_count, hashing()
        # What is only hashed comes last: it then overlaps with the last writes.
        order = sorted(range(layout.chunk_count), key=lambda index: index in there)

        def write_chunk(number: int) -> None:
            index = order[number]
            begin, end = chunk_bounds(layout, index)
            if index not in there:
                pace.wait(end - begin)
            with view[begin:end] as chunk, turn:
                digests[index] = xxh3_128(chunk)  # first: a later change of it will be noticed
            if index not in there:
                self._write(view, begin, end)

        for_each_chunk(
            write_chunk, layout.chunk_count, threads=self.threads, niceness=WRITER_NICENESS
        )
        return digests

    def _write(self, view: memoryview, begin: int, end: int) -> None:
        faults.point("write.data")
        with view[begin:end] as chunk:
            self.filesystem.write(self.fd, chunk, begin)

    def read(self, into: memoryview, offset: int) -> int:
        """Fill the page-aligned `into`. Returns the bytes read: fewer only at the file's end."""
        faults.point("load.read")
        return self.filesystem.read(self.fd, into, offset)


def seal_file(filesystem: Filesystem, fd: int, manifest: Manifest, *, phase: str) -> None:
    """Write table and control page after the chunks. `phase`: prefix of the fault points.

    Everything rests on this rule: data and digests are on the medium before the seal is written,
    and the seal is on the medium before the file gets its name. So a power cut at any moment leaves
    a file without a valid seal, or a whole file.
    """
    layout = manifest.layout
    _write_pages(filesystem, fd, manifest.table, layout.digests_begin)
    faults.point(f"{phase}.data-sync")
    filesystem.sync_data(fd)
    faults.point(f"{phase}.control")
    _write_pages(filesystem, fd, manifest.page, layout.control_begin)
    faults.point(f"{phase}.control-sync")
    filesystem.sync_data(fd)


def _write_pages(filesystem: Filesystem, fd: int, data: memoryview, offset: int) -> None:
    """Write whole pages that do not lie in a slot, from memory that O_DIRECT accepts."""
    with aligned_buffer(len(data)) as buffer:
        buffer[:] = data
        with memoryview(buffer) as pages:
            filesystem.write(fd, pages, offset)


@contextlib.contextmanager
def open_shard(
    path: Path,
    flags: int,
    *,
    filesystem: Filesystem,
    engine: Engine,
    threads: int,
) -> Iterator[ShardFile]:
    """Open `path` with the flags that `engine` needs. Raises OSError."""
    fd = filesystem.open(path, flags | engine.open_flags)
    try:
        yield ShardFile(filesystem=filesystem, fd=fd, threads=threads)
        if engine is Engine.BUFFERED:
            filesystem.forget_cache(fd)
    finally:
        filesystem.close(fd)
