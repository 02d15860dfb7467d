"""One shard file: writes a slot's image with its seal, and reads an image back.

A seal means that everything before it is in place. So the seal (the control page) is the last thing
that reaches a file or a slot. The module `volume` is responsible for names and directories.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
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


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """An open file of one image. The code that opened `fd` closes it."""

    filesystem: Filesystem
    fd: int
    threads: int

    def write(
        self, view: memoryview, layout: Layout, control: ControlPage, pace: RateLimit
    ) -> Manifest:
        """Write the image in `view` with its digests, and seal it. Raises OSError."""
        faults.point("write.allocate")
        self.filesystem.allocate(self.fd, layout.size_bytes)
        digests = self._write_data(view, layout, pace)
        written = replace(control, written_at=time.time())
        table, seal = seal_for_disk(layout, view, written, digests=digests)
        control = ControlPage.from_bytes(seal)
        manifest = Manifest(layout=layout, control=control, closing=table + seal)
        faults.point("write.table")
        seal_file(self.filesystem, self.fd, manifest, phase="write")
        return manifest

    def _write_data(self, view: memoryview, layout: Layout, pace: RateLimit) -> list[bytes]:
        """Write every chunk; returns their digests."""
        digests, turn = [b""] * layout.chunk_count, hashing()

        def write_chunk(index: int) -> None:
            begin, end = chunk_bounds(layout, index)
            pace.wait(end - begin)
            with view[begin:end] as chunk:
                with turn:  # Hash first: any later change of these bytes will be noticed.
                    digests[index] = xxh3_128(chunk)
                faults.point("write.data")
                self.filesystem.write(self.fd, chunk, begin)

        for_each_chunk(
            write_chunk, layout.chunk_count, threads=self.threads, niceness=WRITER_NICENESS
        )
        return digests

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
