"""Writes files that must outlive a power cut: shards, copies for other pods, the objects of an
archive in a directory, a run's record. All of them are written here.

Everything rests on this order. A file is made under a hidden name, which no reader opens. Its data
are on the medium before a seal is written, its seal before it gets its name, and its name before
anything counts on it. So a power cut at any moment leaves a whole file of that name, or the one
that was there before, if any.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from keepstep.image import ControlPage, Layout, chunk_bounds, seal_for_disk
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

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class DurableFile:
    """A file that is hidden as `temporary` until it gets its `path`. Methods raise OSError.

    `fd`: its descriptor, -1 once it is closed.
    """

    def __init__(
        self,
        path: Path,
        *,
        filesystem: Filesystem,
        temporary: Path | None = None,
        engine: Engine = Engine.BUFFERED,
        flags: int = _CREATE,
        phase: str = "",
    ) -> None:
        """Make it, or open one that is there if `flags` say so. `phase`: prefix of its fault
        points; without one it has none."""
        self.path = path
        self.temporary = temporary or path.with_name(f".{path.name}.tmp")
        self.filesystem = filesystem
        self._engine = engine
        self._phase = phase
        self._point("create")
        self.fd = filesystem.open(self.temporary, flags | engine.open_flags)

    def _point(self, name: str) -> None:
        if self._phase:
            faults.point(f"{self._phase}.{name}")

    def reopen(self) -> None:
        """Another file has got its hidden name: go on with that one."""
        self.close()
        self.fd = self.filesystem.open(self.temporary, os.O_WRONLY | self._engine.open_flags)

    def allocate(self, size_bytes: int) -> None:
        """Make room for so many bytes."""
        self._point("allocate")
        self.filesystem.allocate(self.fd, size_bytes)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, in any order and from any thread."""
        self._point("data")
        self.filesystem.write(self.fd, data, offset)

    def write_image(
        self,
        view: memoryview,
        layout: Layout,
        control: ControlPage,
        *,
        pace: RateLimit,
        threads: int,
    ) -> Manifest:
        """Write the image in the slot `view` with its digests, and seal it."""
        digests, turn = [b""] * layout.chunk_count, hashing()

        def write_chunk(index: int) -> None:
            begin, end = chunk_bounds(layout, index)
            pace.wait(end - begin)
            with view[begin:end] as chunk:
                with turn:
                    digests[index] = xxh3_128(chunk)  # first: a later change of it will be noticed
                self.write(chunk, begin)

        for_each_chunk(write_chunk, layout.chunk_count, threads=threads, niceness=WRITER_NICENESS)
        written = replace(control, written_at=time.time())
        table, page = seal_for_disk(layout, view, written, digests=digests)
        manifest = Manifest(
            layout=layout, control=ControlPage.from_bytes(page), closing=table + page
        )
        self.seal(manifest)
        return manifest

    def seal(self, manifest: Manifest) -> None:
        """All chunks are written: write the digest table, and, once these are on the medium, the
        control page."""
        self._point("table")
        self._write_pages(manifest.table, manifest.layout.digests_begin)
        self.flush()
        self._point("control")
        self._write_pages(manifest.page, manifest.layout.control_begin)
        self._point("control-sync")
        self.filesystem.sync_data(self.fd)

    def _write_pages(self, data: memoryview, offset: int) -> None:
        """Write whole pages that do not lie in a slot, from memory that O_DIRECT accepts."""
        with aligned_buffer(len(data)) as buffer:
            buffer[:] = data
            with memoryview(buffer) as pages:
                self.filesystem.write(self.fd, pages, offset)

    def flush(self) -> None:
        """Return when everything written is on the medium."""
        self._point("data-sync")
        self.filesystem.sync_data(self.fd)
        if self._engine is Engine.BUFFERED:
            self.filesystem.forget_cache(self.fd)

    def give_name(self) -> None:
        """Give it its path, durably, in place of what was there. Call it after `seal` or `flush`.

        Where nothing was there, a name of which it is unknown whether it would survive a power cut
        is taken back: the caller will not count this file, so a scan must not either.
        """
        replaces = self.filesystem.lstat(self.path) is not None
        self._point("rename")
        self.filesystem.rename(self.temporary, self.path)
        try:
            self._point("directory-sync")
            self.filesystem.sync_directory(self.path.parent)
        except OSError:
            if not replaces:
                self.filesystem.rename(self.path, self.temporary)
            raise

    def give_new_name(self) -> None:
        """Give it its path, durably. Raises FileExistsError if something is there, which then has
        its name durably, too: the caller may count on it, although who made it was killed or failed
        before the directory was on the medium."""
        try:
            self.filesystem.link(self.temporary, self.path)
        finally:
            self._point("directory-sync")
            self.filesystem.sync_directory(self.path.parent)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.filesystem.close(fd)

    def drop(self) -> None:
        """Close it, and remove its hidden name if it still has that. Raises nothing: an error
        before is the one to report."""
        with contextlib.suppress(OSError):
            self.close()
        with contextlib.suppress(OSError):
            self.filesystem.unlink(self.temporary)


@contextlib.contextmanager
def replacing(path: Path, *, filesystem: Filesystem, phase: str = "") -> Iterator[DurableFile]:
    """A new file for one writer at a time, which leaves nothing if it gets no name. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):  # of a process that was killed
        filesystem.unlink(path.with_name(f".{path.name}.tmp"))
    file = DurableFile(path, filesystem=filesystem, phase=phase)
    try:
        yield file
    finally:
        file.drop()
