"""One shard file: a slot's image goes out sealed, a file's image comes in verified.

A seal means: everything before it is in place. So the seal (the control page) is the last thing
that reaches a file, and the last thing that reaches a slot. Names and directories are `volume`'s
business, not ours.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.errors import TornError
from keepstep.image import (
    ControlPage,
    Layout,
    check_chunk,
    check_table,
    chunk_bounds,
    seal_for_disk,
)
from keepstep.image.xxh3 import xxh3_128
from keepstep_sidecar.config.verify import Verify
from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.direct_io import (
    WRITER_NICENESS,
    Engine,
    Pace,
    aligned_buffer,
    for_each_chunk,
)
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.scan import opened, read_sealed


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """An open file of one image; whoever opened `fd` closes it."""

    filesystem: Filesystem
    fd: int
    threads: int
    verify: Verify = Verify.FULL

    def write(
        self, view: memoryview, layout: Layout, control: ControlPage, pace: Pace
    ) -> tuple[ControlPage, float]:
        """Write the image in `view` with its digests, and seal it; the page that seals it, and the
        CPU seconds of the threads. Raises OSError."""
        faults.point("write.allocate")
        self.filesystem.allocate(self.fd, layout.size_bytes)
        digests, cpu_s = self._write_data(view, layout, pace)
        written = replace(control, written_at=time.time())
        table, seal = seal_for_disk(layout, view, written, digests=digests)
        faults.point("write.table")
        self._write_pages(table, layout.digests_begin)
        # The rule that everything rests on: data and digests are on the medium before the seal is
        # even written, and the seal is on the medium before the file gets its name. So a power
        # cut at any moment leaves a file without a valid seal, or a whole one.
        faults.point("write.data-sync")
        self.filesystem.sync_data(self.fd)
        faults.point("write.control")
        self._write_pages(seal, layout.control_begin)
        faults.point("write.control-sync")
        self.filesystem.sync_data(self.fd)
        return ControlPage.from_bytes(seal), cpu_s

    def _write_data(
        self, view: memoryview, layout: Layout, pace: Pace
    ) -> tuple[list[bytes], float]:
        """Write every chunk; returns their digests and the threads' CPU seconds."""
        digests = [b""] * layout.chunk_count

        def write_chunk(index: int) -> None:
            begin, end = chunk_bounds(layout, index)
            pace.wait(end - begin)
            with view[begin:end] as chunk:
                # First the digest: whatever happens to these bytes from here on will be noticed.
                digests[index] = xxh3_128(chunk)
                faults.point("write.data")
                self.filesystem.write(self.fd, chunk, begin)

        cpu_s = for_each_chunk(
            write_chunk, layout.chunk_count, threads=self.threads, niceness=WRITER_NICENESS
        )
        return digests, cpu_s

    def _write_pages(self, data: bytes, offset: int) -> None:
        """Write whole pages that do not lie in the slot, from memory that O_DIRECT accepts."""
        with aligned_buffer(len(data)) as buffer:
            buffer[:] = data
            with memoryview(buffer) as pages:
                self.filesystem.write(self.fd, pages, offset)

    def load(self, view: memoryview, layout: Layout, control: ControlPage, path: Path) -> None:
        """Read the image into the unsealed slot `view` and verify it, as `verify` says.

        `view` has the image's size; `layout` and `control` come from this file. Raises
        DigestError, TornError, OSError; the slot then is as unsealed as before.
        """
        with view[layout.digests_begin : layout.control_begin] as table:
            self._read(table, layout.digests_begin, path)
            check_table(control, layout, table, path=path)
            self._load_data(view, layout, table, path)
        faults.point("load.control")
        with view[layout.control_begin :] as page:
            self._read(page, layout.control_begin, path)

    def _load_data(self, view: memoryview, layout: Layout, table: memoryview, path: Path) -> None:
        def load_chunk(index: int) -> None:
            begin, end = chunk_bounds(layout, index)
            with view[begin:end] as chunk:
                self._load_chunk(index, chunk, layout, path)
                if self.verify is Verify.FULL:
                    check_chunk(layout, index, chunk, table, path=path)

        for_each_chunk(load_chunk, layout.chunk_count, threads=self.threads)

    def load_chunk(self, index: int, into: memoryview, proof: Proof, path: Path) -> None:
        """Read one chunk into the page-aligned `into`, of exactly its bytes, and verify it.

        Whatever `verify` says: nobody looks at the chunk again. Raises DigestError, TornError,
        OSError.
        """
        self._load_chunk(index, into, proof.layout, path)
        check_chunk(proof.layout, index, into, proof.table, path=path)

    def _load_chunk(self, index: int, into: memoryview, layout: Layout, path: Path) -> None:
        faults.point("load.read")
        self._read(into, chunk_bounds(layout, index)[0], path)

    def _read(self, into: memoryview, offset: int, path: Path) -> None:
        if self.filesystem.read(self.fd, into, offset) < len(into):
            raise TornError(f"truncated: it ends before byte {offset + len(into)}", path=path)


@contextlib.contextmanager
def open_shard(
    path: Path,
    flags: int,
    *,
    filesystem: Filesystem,
    engine: Engine,
    threads: int,
    verify: Verify = Verify.FULL,
) -> Iterator[ShardFile]:
    """Open `path` as `engine` wants it. Raises OSError."""
    fd = filesystem.open(path, flags | engine.open_flags)
    try:
        yield ShardFile(filesystem=filesystem, fd=fd, threads=threads, verify=verify)
        if engine is Engine.BUFFERED:
            filesystem.forget_cache(fd)
    finally:
        filesystem.close(fd)


# --- what proves a chunk ---------------------------------------------------------------------
#
# What proves single chunks of a shard: its seal and its digest table, read and checked once.
#
# A seal vouches for the table and the table for every chunk, so whoever keeps a `Proof` can
# believe any chunk on its own, from whatever place it comes.


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Of one shard. `table`: its digest table, believed because `control` vouches for it."""

    layout: Layout
    control: ControlPage
    table: bytes


def prove(path: Path, *, run: str) -> Proof:
    """The proof that a file carries. Raises ImageError and its kin, OSError."""
    with opened(path) as fd:
        layout, control = read_sealed(fd, path, run=run)
        size = layout.control_begin - layout.digests_begin
        table = os.pread(fd, size, layout.digests_begin)
    if len(table) < size:
        raise TornError("truncated: it ends in its digest table", path=path)
    check_table(control, layout, table, path=path)
    return Proof(layout=layout, control=control, table=table)
