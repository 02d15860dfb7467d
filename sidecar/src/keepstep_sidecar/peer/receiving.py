"""One copy on its way in. What is there already is found out by its digests, not by a journal.

Header, digest table and control page come first and are kept in memory; then chunks, in any order,
over any number of connections, each checked against the table before it is written. A receiver that
was killed reads what its predecessor left: a chunk whose digest is right is there, any other is
missing. The seal comes last, as in `shardfile`: data and table, `fdatasync`, control page,
`fdatasync`, rename, `fsync` of the directories. So a copy that has its name is whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from keepstep.digests import CHUNK_BYTES, DIGEST_BYTES, xxh3_128
from keepstep.errors import FormatError
from keepstep.image import (
    PAGE_BYTES,
    ControlPage,
    Layout,
    check_chunk,
    check_control,
    check_table,
    chunk_bounds,
)
from keepstep_sidecar import faults
from keepstep_sidecar.engine import Engine, aligned_buffer
from keepstep_sidecar.filesystem import Filesystem
from keepstep_sidecar.tree import ShardName


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a copy will be: everything of a shard but its chunks. `control` is the page's bytes."""

    layout: Layout
    table: bytes
    page: bytes
    control: ControlPage

    @classmethod
    def parse(cls, data: memoryview, *, run: str, name: ShardName, path: Path) -> Manifest:
        """Read header, table and page, one after the other. Raises ImageError, naming `path`."""
        layout = Layout.parse(data)
        begin = len(layout.header)
        end = begin + layout.control_begin - layout.digests_begin
        if len(data) != end + PAGE_BYTES:
            raise FormatError(
                f"{len(data)} bytes are not header, table and control page", path=path
            )
        table, page = bytes(data[begin:end]), bytes(data[end:])
        control = ControlPage.from_bytes(page)
        check_control(control, layout, run=run, id=name.id, path=path)
        if (control.rank, control.world) != (name.rank, name.world):
            raise FormatError(f"holds rank {control.rank} of {control.world}", path=path)
        check_table(control, layout, table, path=path)
        return cls(layout=layout, table=table, page=page, control=control)


class Part:
    """The file of one unfinished copy, `.<shard>.part` beside where it will be.

    Thread-safe. Methods raise OSError, and DigestError for bytes that are not the chunk's.
    """

    def __init__(
        self, path: Path, manifest: Manifest, *, filesystem: Filesystem, engine: Engine
    ) -> None:
        """Open or make the file, of its full size, and find out what is missing of it."""
        self.path = path
        self.manifest = manifest
        self._filesystem = filesystem
        self._temporary = path.with_name(part_name(path.name))
        self._lock = threading.Lock()
        existed = self._temporary.exists()
        faults.point("peer.create")
        flags = os.O_RDWR | os.O_CREAT | engine.open_flags
        self._fd = filesystem.open(self._temporary, flags)
        try:
            existed = existed and os.fstat(self._fd).st_size == manifest.layout.size_bytes
            if not existed:
                os.ftruncate(self._fd, 0)
                filesystem.allocate(self._fd, manifest.layout.size_bytes)
            self._missing = self._look() if existed else set(range(manifest.layout.chunk_count))
        except BaseException:
            filesystem.close(self._fd)
            raise

    @property
    def missing(self) -> tuple[int, ...]:
        """Chunk numbers, ascending."""
        with self._lock:
            return tuple(sorted(self._missing))

    def _look(self) -> set[int]:
        layout, missing = self.manifest.layout, set()
        with aligned_buffer(CHUNK_BYTES) as buffer, memoryview(buffer) as view:
            for chunk in range(layout.chunk_count):
                begin, end = chunk_bounds(layout, chunk)
                with view[: end - begin] as data:
                    self._filesystem.read(self._fd, data, begin)
                    at = chunk * DIGEST_BYTES
                    if xxh3_128(data) != self.manifest.table[at : at + DIGEST_BYTES]:
                        missing.add(chunk)
        return missing

    def write(self, chunk: int, data: memoryview, *, whose: str) -> None:
        """Put a chunk into its place; `data` is page aligned. `whose`: who sent it."""
        layout = self.manifest.layout
        check_chunk(layout, chunk, data, self.manifest.table, path=f"{self.path} from {whose}")
        faults.point("peer.data")
        self._filesystem.write(self._fd, data, chunk_bounds(layout, chunk)[0])
        with self._lock:
            self._missing.discard(chunk)

    def seal(self) -> str:
        """Make it durable and give it its name; idempotent. Returns the root."""
        with self._lock:
            if self._missing:
                raise FormatError(f"{len(self._missing)} chunks are missing", path=self.path)
            if self._fd >= 0:
                self._seal()
                self._close()
        return self.manifest.control.root or ""

    def _seal(self) -> None:
        layout = self.manifest.layout
        self._write_pages(self.manifest.table, layout.digests_begin)
        # As in shardfile: the data is on the medium before the seal is written, and the seal is
        # before the file gets its name.
        faults.point("peer.data-sync")
        self._filesystem.sync_data(self._fd)
        faults.point("peer.control")
        self._write_pages(self.manifest.page, layout.control_begin)
        faults.point("peer.control-sync")
        self._filesystem.sync_data(self._fd)
        faults.point("peer.rename")
        self._filesystem.rename(self._temporary, self.path)
        faults.point("peer.directory-sync")
        self._filesystem.sync_directory(self.path.parent)
        faults.point("peer.done")

    def _write_pages(self, data: bytes, offset: int) -> None:
        with aligned_buffer(len(data)) as buffer:
            buffer[:] = data
            with memoryview(buffer) as pages:
                self._filesystem.write(self._fd, pages, offset)

    def close(self) -> None:
        """Leave the file as it is, for whoever goes on with it."""
        with self._lock:
            self._close()

    def discard(self) -> None:
        """Remove the file: it failed, or nobody wants it."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.unlink(self._temporary)

    def _close(self) -> None:
        if self._fd >= 0:
            self._filesystem.close(self._fd)
            self._fd = -1


def part_name(shard: str) -> str:
    """Hidden from readers; constant, so that a successor finds it."""
    return f".{shard}.part"


def is_part(name: str) -> bool:
    """Is this a name that `part_name` makes?"""
    return name.startswith(".rank-") and name.endswith(".part")
