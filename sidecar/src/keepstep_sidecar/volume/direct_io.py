"""How bytes move between a slot and a file: the engine, its limits, and a few threads.

`Engine.DIRECT` uses O_DIRECT: the drive reads and writes the slot's own pages, so nothing is copied
and the page cache stays as it was. `Engine.BUFFERED` serves file systems that refuse O_DIRECT.
Threads release the GIL while they hash or wait for the drive.

Sixteen chunks under way keep a drive's queue full; nearly all of these threads wait for the drive.
Only a few may hash at a time: two that hash on two cores take more CPU than one, and leave less of
it to the training. Bytes move directly from and to the slot's mapping: no buffer here grows with
the image.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keepstep.steps import StrEnum
from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.filesystem import PAGE_BYTES, Filesystem

WRITER_NICENESS = 5
"""Training comes first, so writers give way. A restore does not give way, because ranks wait for
it. Beside busy cores, a niceness of 10 doubled the time to durable, and 19 made it ten times as
long, for the same CPU seconds."""

_COPYING_THREADS = 4
"""As many at most where the kernel copies to or from the page cache: this is work, no waiting."""

_CORES_PER_HASH = 4


class Engine(StrEnum):
    """How a volume reads and writes its files."""

    DIRECT = "direct"
    BUFFERED = "buffered"

    @property
    def open_flags(self) -> int:
        """The flags to add to those of `open`."""
        return os.O_DIRECT if self is Engine.DIRECT else 0

    def threads(self, threads: int) -> int:
        """How many of `threads` are worth having."""
        return threads if self is Engine.DIRECT else min(threads, _COPYING_THREADS)


def probe(filesystem: Filesystem, directory: Path) -> tuple[Engine, str]:
    """Write one page with O_DIRECT below `directory`. Returns the engine that works, and why.

    Raises OSError when nothing can be written there at all. A full disk is no error: what it holds
    can still be restored.
    """
    path = directory / f".probe-{os.getpid()}"
    try:
        _write_page(filesystem, path, Engine.DIRECT)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return Engine.DIRECT, "O_DIRECT, not tried: the file system is full"
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        _write_page(filesystem, path, Engine.BUFFERED)
        return Engine.BUFFERED, f"O_DIRECT refused: {error.strerror}"
    return Engine.DIRECT, "O_DIRECT works"


def _write_page(filesystem: Filesystem, path: Path, engine: Engine) -> None:
    fd = filesystem.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | engine.open_flags)
    try:
        with aligned_buffer(PAGE_BYTES) as buffer, memoryview(buffer) as page:
            filesystem.write(fd, page, 0)
    finally:
        filesystem.close(fd)
        filesystem.unlink(path)


def aligned_buffer(size_bytes: int) -> mmap.mmap:
    """Zeroed memory that O_DIRECT accepts: page aligned, a multiple of the page size."""
    return mmap.mmap(-1, size_bytes)


def hashing() -> threading.Semaphore:
    """To be held while a chunk is hashed; one for all threads of an image. Lets one of them hash at
    a time, or one for four cores."""
    return threading.Semaphore(max(1, (os.cpu_count() or 1) // _CORES_PER_HASH))


class RateLimit:
    """Limits the rate of all its users together to `bytes_per_second`."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._next_at = time.monotonic()
        self._lifted = 0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        """Return once `size_bytes` may pass."""
        if (limit := self._bytes_per_second) is None or self._lifted:
            return
        with self._lock:
            at = max(self._next_at, time.monotonic())
            self._next_at = at + size_bytes / limit
        time.sleep(max(0.0, at - time.monotonic()))

    def wait_last(self, size_bytes: int, *, until: float) -> bool:
        """Like `wait`, but behind all other users: nothing passes here while they use the whole
        rate. Returns False if the bytes may not pass by `until` (monotonic clock)."""
        while (limit := self._bytes_per_second) is not None and not self._lifted:
            with self._lock:
                now = time.monotonic()
                if (free_in_s := self._next_at - now) <= 0:
                    self._next_at = now + size_bytes / limit
                    break
            if now + free_in_s > until:
                return False
            time.sleep(free_in_s)
        return True

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lift the limit in this context: a deadline is near. Only for one thread at a time."""
        self._lifted += 1
        try:
            yield
        finally:
            self._lifted -= 1


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """An open shard, to be read. The code that opened `fd` closes it."""

    filesystem: Filesystem
    fd: int
    threads: int

    def read(self, into: memoryview, offset: int) -> int:
        """Fill the page-aligned `into`. Returns the bytes read: fewer only at the file's end."""
        faults.point("load.read")
        return self.filesystem.read(self.fd, into, offset)


@contextmanager
def open_shard(
    path: Path, *, filesystem: Filesystem, engine: Engine, threads: int
) -> Iterator[ShardFile]:
    """Open a shard for reading, with the flags that `engine` needs. Raises OSError."""
    fd = filesystem.open(path, os.O_RDONLY | engine.open_flags)
    try:
        yield ShardFile(filesystem=filesystem, fd=fd, threads=threads)
        if engine is Engine.BUFFERED:
            filesystem.forget_cache(fd)
    finally:
        filesystem.close(fd)
