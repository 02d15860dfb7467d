"""One incoming copy, from another pod or from an archive. Digests show what is already there.

Header, digest table and control page come first and are kept in memory. Then chunks come in any
order over any number of connections, and each is checked against the table before it is written.
Chunks that an image of this machine has too need not be sent. They need not even be written where
the file system can share blocks. A receiver that follows a killed one reads what that one left: a
chunk with the right digest is there, any other is missing. It is a `DurableFile`: a copy that has
its name is whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from keepstep.errors import DigestError, FormatError, StorageError
from keepstep.image.control_page import Manifest
from keepstep.image.layout import CHUNK_BYTES
from keepstep_sidecar.concurrency import for_each_chunk
from keepstep_sidecar.tiers.verified_chunks import OpenSource
from keepstep_sidecar.volume.files import (
    WRITER_NICENESS,
    DurableFile,
    Filesystem,
    IoMode,
    RateLimit,
    aligned_buffer,
    fault_point,
)

_TAKE_S = 20.0


class CopyFileError(Exception):
    """This copy's own file failed; `error` is the cause."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class IncomingCopy:
    """The file of one unfinished copy: `.<shard>.part` beside its final path.

    Thread-safe. Methods raise OSError, StorageError when the copy was closed meanwhile, and
    DigestError for bytes that are not the chunk's.
    """

    def __init__(
        self, path: Path, manifest: Manifest, *, filesystem: Filesystem, engine: IoMode
    ) -> None:
        """Open or make the file, in its full size. `scan_existing_chunks` finds out which chunks
        are missing."""
        self.path = path
        self.manifest = manifest
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._inspecting = threading.Lock()
        self.shared_bytes = 0
        self._users = 0
        self._closed = False
        self._missing = set(range(manifest.layout.chunk_count))
        temporary = path.with_name(part_name(path.name))
        existed = filesystem.lstat(temporary) is not None
        self._file = DurableFile(
            path,
            temporary=temporary,
            filesystem=filesystem,
            engine=engine,
            flags=os.O_RDWR | os.O_CREAT,
            phase="peer",
        )
        try:
            existed = existed and os.fstat(self._file.fd).st_size == manifest.layout.size_bytes
            if not existed:
                os.ftruncate(self._file.fd, 0)
                self._file.allocate(manifest.layout.size_bytes)
        except BaseException:
            self._file.close()
            raise
        self._inspected = not existed

    @property
    def missing(self) -> tuple[int, ...]:
        """The numbers of missing chunks, ascending."""
        with self._lock:
            return tuple(sorted(self._missing))

    def scan_existing_chunks(self) -> None:
        """Find out which chunks a predecessor has left. Reads the whole file, once. Other callers
        wait meanwhile; arriving chunks do not. Raises OSError, and StorageError as `write` does."""
        with self._inspecting:
            if self._inspected:
                return
            with aligned_buffer(CHUNK_BYTES) as buffer, memoryview(buffer) as view:
                for chunk in range(self.manifest.layout.chunk_count):
                    self._inspect(chunk, view)
            self._inspected = True

    def _inspect(self, chunk: int, view: memoryview) -> None:
        begin, end = self.manifest.bounds_of_chunk(chunk)
        with view[: end - begin] as data, self._using() as fd:
            self._filesystem.read_into(fd, data, begin)
            with contextlib.suppress(DigestError):
                self.manifest.verify_chunk(chunk, data)
                with self._lock:
                    self._missing.discard(chunk)

    def reuse_matching_chunks(self, other: OpenSource, fd: int, pace: RateLimit) -> None:
        """Take the chunks that another image of this machine has too, as images of replicas do.
        `fd` is that image, open. Each chunk is read and verified, so a damaged chunk there does no
        harm here. Then the chunk shares the blocks that were read (`shared_bytes`), or is written
        if it cannot share them.

        This works from the end of the image, because missing chunks arrive from the beginning. It
        takes `_TAKE_S` seconds at most, because the sender asks again. It gives way to the
        training, and to all writes that share `pace`: chunks for which there was no time are sent.
        Raises CopyFileError, and StorageError as `write` does.
        """
        ends = time.monotonic() + _TAKE_S

        def take(index: int) -> None:
            begin, end = self.manifest.bounds_of_chunk(chunk := alike[index])
            if time.monotonic() > ends or not pace.wait_with_lowest_priority(
                end - begin, until=ends
            ):
                return
            with view[: end - begin] as data, contextlib.suppress(DigestError):
                for _, read in other.read([(chunk, data)]):
                    if not self._share(chunk, fd):
                        self._write_own(chunk, read, whose=other.source.where)

        with self._inspecting, aligned_buffer(CHUNK_BYTES) as buffer, memoryview(buffer) as view:
            missing = reversed(self.missing)
            alike = [chunk for chunk in missing if _alike(chunk, self.manifest, other.manifest)]
            # A separate thread: the calling thread has other requests to answer, and niceness
            # cannot be taken back.
            for_each_chunk(take, len(alike), threads=1, niceness=WRITER_NICENESS)

    def _share(self, chunk: int, other: int) -> bool:
        """Let this chunk share the blocks of `other`. Returns False if it must be written instead:
        the file system cannot share blocks, or there is another obstacle, which a write reports
        better."""
        begin, end = self.manifest.bounds_of_chunk(chunk)
        try:
            with self._using() as fd:
                self._filesystem.clone_range(other, fd, begin, end - begin)
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
            raise CopyFileError(error) from error

    @contextlib.contextmanager
    def _using(self) -> Iterator[int]:
        """The descriptor, which stays open in this context: once it is closed, another file soon
        gets its number. Raises StorageError when it is closed."""
        with self._lock:
            if self._closed:
                raise StorageError(
                    f"{self.path}: this copy was given up or restarted; send it from its beginning"
                )
            self._users += 1
        try:
            yield self._file.fd
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and self._users == 0:
                    self._file.close()

    def write(self, chunk: int, data: memoryview, *, whose: str) -> None:
        """Write a chunk to its place. `data` is page aligned. `whose`: the sender."""
        self.manifest.verify_chunk(chunk, data, path=f"{self.path} from {whose}")
        with self._using():
            self._file.write(data, self.manifest.bounds_of_chunk(chunk)[0])
        with self._lock:
            self._missing.discard(chunk)

    def seal(self) -> str:
        """Make the copy durable and give it its name. Idempotent. Returns the root."""
        with self._lock:
            if self._missing:
                raise FormatError(f"{len(self._missing)} chunks are missing", path=self.path)
            if not self._closed:
                self._file.write_seal(self.manifest)
                self._file.give_name()
                fault_point("peer.done")
                self._close()
        return self.manifest.control.root or ""

    def close(self) -> None:
        """Close the file as it is, so that the copy can be continued."""
        with self._lock:
            self._close()

    def discard(self) -> None:
        """Remove the file, because it failed or is not wanted."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.unlink(self._file.temporary)

    def _close(self) -> None:
        self._closed = True
        if self._users == 0:  # else the last user closes it
            self._file.close()


def _alike(chunk: int, first: Manifest, other: Manifest) -> bool:
    """Whether both images have the chunk alike in place, size and digest."""
    return (
        chunk in other.chunk_indices
        and first.get_chunk_digest(chunk) == other.get_chunk_digest(chunk)
        and first.bounds_of_chunk(chunk) == other.bounds_of_chunk(chunk)
    )


def part_name(shard: str) -> str:
    """A name that is hidden from readers, and constant, so that a later sidecar finds it."""
    return f".{shard}.part"


def is_part(name: str) -> bool:
    """Is this a name that `part_name` makes?"""
    return name.startswith((".rank-", ".base-")) and name.endswith(".part")
