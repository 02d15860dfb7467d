"""One copy on its way in. What is there already is found out by its digests, not by a journal.

Header, digest table and control page come first and are kept in memory; then chunks, in any order,
over any number of connections, each checked against the table before it is written. Chunks that an
image of this machine has alike need not come at all, nor be written where the file system can share
blocks. A receiver that was killed reads what its predecessor left: a chunk whose digest is right is
there, any other is missing. The seal comes last, as in `shard_file`: data and table, `fdatasync`,
control page, `fdatasync`, rename, `fsync` of the directories. So a copy that has its name is whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from keepstep.errors import DigestError, FormatError, StorageError
from keepstep.image.manifest import Manifest
from keepstep.image.xxh3 import CHUNK_BYTES
from keepstep_sidecar.tiers.transfer import Opened
from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.direct_io import (
    WRITER_NICENESS,
    Engine,
    Pace,
    aligned_buffer,
    for_each_chunk,
)
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.shard_file import seal_file

_TAKE_S = 20.0


class Broken(Exception):
    """This copy's file failed; `error` says how."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class IncomingCopy:
    """The file of one unfinished copy, `.<shard>.part` beside where it will be.

    Thread-safe. Methods raise OSError, StorageError when it was closed meanwhile, and DigestError
    for bytes that are not the chunk's.
    """

    def __init__(
        self, path: Path, manifest: Manifest, *, filesystem: Filesystem, engine: Engine
    ) -> None:
        """Open or make the file, of its full size; `look` finds out what is missing of it."""
        self.path = path
        self.manifest = manifest
        self._filesystem = filesystem
        self._temporary = path.with_name(part_name(path.name))
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self.shared_bytes = 0
        self._users = 0
        self._missing = set(range(manifest.layout.chunk_count))
        existed = self._temporary.exists()
        faults.point("peer.create")
        flags = os.O_RDWR | os.O_CREAT | engine.open_flags
        self._fd = filesystem.open(self._temporary, flags)
        try:
            existed = existed and os.fstat(self._fd).st_size == manifest.layout.size_bytes
            if not existed:
                os.ftruncate(self._fd, 0)
                filesystem.allocate(self._fd, manifest.layout.size_bytes)
        except BaseException:
            filesystem.close(self._fd)
            raise
        self._looked = not existed

    @property
    def missing(self) -> tuple[int, ...]:
        """Chunk numbers, ascending."""
        with self._lock:
            return tuple(sorted(self._missing))

    def look(self) -> None:
        """Find out which chunks a predecessor has left. Reads the whole file, once; whoever asks
        meanwhile waits, and chunks that arrive do not. Raises OSError, StorageError as `write`."""
        with self._looking:
            if self._looked:
                return
            with aligned_buffer(CHUNK_BYTES) as buffer, memoryview(buffer) as view:
                for chunk in range(self.manifest.layout.chunk_count):
                    self._look_at(chunk, view)
            self._looked = True

    def _look_at(self, chunk: int, view: memoryview) -> None:
        begin, end = self.manifest.bounds(chunk)
        with view[: end - begin] as data, self._using() as fd:
            self._filesystem.read(fd, data, begin)
            with contextlib.suppress(DigestError):
                self.manifest.check(chunk, data)
                with self._lock:
                    self._missing.discard(chunk)

    def take_from(self, other: Opened, fd: int, pace: Pace) -> None:
        """Take what another image of this machine, open as `fd`, has alike, as those of replicas
        do. Each chunk is read and verified; what rots there is none of ours. Then it shares the
        blocks that were read (`shared_bytes`), or is written where it cannot. From the end on, as
        what is missing comes from the beginning; some seconds at most, as the sender asks again. It
        gives way to the training, and to all writes that keep to `pace` with it: what does not pass
        is sent. Raises Broken, StorageError as `write`."""
        ends = time.monotonic() + _TAKE_S

        def take(index: int) -> None:
            begin, end = self.manifest.bounds(chunk := alike[index])
            if time.monotonic() > ends or not pace.wait_last(end - begin, until=ends):
                return
            with view[: end - begin] as data, contextlib.suppress(DigestError):
                for _, read in other.read([(chunk, data)]):
                    if not self._share(chunk, fd):
                        self._write_own(chunk, read, whose=other.source.where)

        with self._looking, aligned_buffer(CHUNK_BYTES) as buffer, memoryview(buffer) as view:
            missing = reversed(self.missing)
            alike = [one for one in missing if _alike(one, self.manifest, other.manifest)]
            # a thread of its own: who is asked has others to answer, and niceness is for good
            for_each_chunk(take, len(alike), threads=1, niceness=WRITER_NICENESS)

    def _share(self, chunk: int, other: int) -> bool:
        """Have this chunk on the blocks of `other`. False where it must be written: a file system
        that cannot says so at once, and whatever else stands in the way a write tells better."""
        begin, end = self.manifest.bounds(chunk)
        try:
            with self._using() as fd:
                self._filesystem.clone(other, fd, begin, end - begin)
        except OSError:
            return False
        with self._lock:
            self._missing.discard(chunk)
            self.shared_bytes += end - begin
        return True

    def _write_own(self, chunk: int, data: memoryview, *, whose: str) -> None:
        try:
            self.write(chunk, data, whose=whose)
        except OSError as error:  # of this file, not of the one that is read
            raise Broken(error) from error

    @contextlib.contextmanager
    def _using(self) -> Iterator[int]:
        """The descriptor, which stays open that long: once closed, its number is soon another
        file's. Raises StorageError when it is closed."""
        with self._lock:
            if (fd := self._fd) < 0:
                raise StorageError(
                    f"{self.path}: this copy was given up or begun anew; begin again"
                )
            self._users += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users -= 1
                if self._fd < 0 and self._users == 0:
                    self._filesystem.close(fd)

    def write(self, chunk: int, data: memoryview, *, whose: str) -> None:
        """Put a chunk into its place; `data` is page aligned. `whose`: who sent it."""
        self.manifest.check(chunk, data, path=f"{self.path} from {whose}")
        faults.point("peer.data")
        with self._using() as fd:
            self._filesystem.write(fd, data, self.manifest.bounds(chunk)[0])
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
        seal_file(self._filesystem, self._fd, self.manifest, phase="peer")
        faults.point("peer.rename")
        self._filesystem.rename(self._temporary, self.path)
        faults.point("peer.directory-sync")
        self._filesystem.sync_directory(self.path.parent)
        faults.point("peer.done")

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
        fd, self._fd = self._fd, -1
        if fd >= 0 and self._users == 0:  # else the last user does it
            self._filesystem.close(fd)


def _alike(chunk: int, one: Manifest, other: Manifest) -> bool:
    """By place, size and digest."""
    return (
        chunk in other.chunks
        and one.digest(chunk) == other.digest(chunk)
        and one.bounds(chunk) == other.bounds(chunk)
    )


def part_name(shard: str) -> str:
    """Hidden from readers; constant, so that a successor finds it."""
    return f".{shard}.part"


def is_part(name: str) -> bool:
    """Is this a name that `part_name` makes?"""
    return name.startswith(".rank-") and name.endswith(".part")
