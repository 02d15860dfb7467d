"""How bytes move between a slot and a file: chunk by chunk, on a few threads.

`Engine.DIRECT` is O_DIRECT: the drive reads and writes the slot's own pages, nothing is copied
and the page cache stays as it was. `Engine.BUFFERED` serves file systems that refuse it. Threads
hold no GIL while they hash or wait for the drive.

Four threads keep a drive's queue full while one of them hashes; more have gained nothing where it
was measured. Bytes move from and to the slot's own mapping: no buffer of ours grows with the image.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.steps import Word
from keepstep_sidecar.concurrency import yield_to_others
from keepstep_sidecar.volume.filesystem import PAGE_BYTES, Filesystem

WRITER_NICENESS = 5
"""Training comes first, so writers give way; a restore, which is waited for, does not. Beside busy
cores 10 doubled the time to durable and 19 took ten times as long, for the same CPU seconds."""


class Engine(Word):
    """How a volume reads and writes its files."""

    DIRECT = "direct"
    BUFFERED = "buffered"

    @property
    def open_flags(self) -> int:
        """What to add to the flags of `open`."""
        return os.O_DIRECT if self is Engine.DIRECT else 0


def probe(filesystem: Filesystem, directory: Path) -> tuple[Engine, str]:
    """Write one page with O_DIRECT below `directory`: the engine that works, and why.

    Raises OSError when nothing can be written there at all. A full disk is no reason to fail:
    what it holds can be restored.
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


class Pace:
    """Lets bytes pass at no more than `bytes_per_second`, together for all who share it."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._next_at = time.monotonic()
        self._lifted = 0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        """Return when `size_bytes` may pass."""
        if (limit := self._bytes_per_second) is None or self._lifted:
            return
        with self._lock:
            at = max(self._next_at, time.monotonic())
            self._next_at = at + size_bytes / limit
        time.sleep(max(0.0, at - time.monotonic()))

    def wait_last(self, size_bytes: int, *, until: float) -> bool:
        """`wait`, behind all others: while they use all that may pass, nothing does. False when
        it was not to pass by `until`, on the monotonic clock."""
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
        """No limit meanwhile: a deadline is near. Not for several threads at once."""
        self._lifted += 1
        try:
            yield
        finally:
            self._lifted -= 1


def for_each_chunk(
    work: Callable[[int], None], count: int, *, threads: int, niceness: int = 0
) -> None:
    """Call `work(0) ... work(count - 1)` on `threads` threads.

    The first exception ends it: no further chunk is begun, those in flight are awaited (nobody
    touches the slot any more once this returns), and it is raised.
    """
    crew = _Crew(work, count, niceness)
    members = [
        threading.Thread(target=crew.run, name=f"keepstep-io-{index}")
        for index in range(min(threads, count))
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
    if crew.errors:
        raise crew.errors[0]
    if crew.done != count:  # a thread that ended otherwise must never pass for one that worked
        raise RuntimeError(f"{crew.done} of {count} chunks were done")


class _Crew:
    """What the threads of one `for_each_chunk` share."""

    def __init__(self, work: Callable[[int], None], count: int, niceness: int) -> None:
        self._work = work
        self._niceness = niceness
        self._left = iter(range(count))
        self._lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.done = 0

    def run(self) -> None:
        try:
            if self._niceness:
                yield_to_others(self._niceness)
            while (index := self._take()) is not None:
                self._work(index)
                with self._lock:
                    self.done += 1
        except BaseException as error:
            with self._lock:
                self.errors.append(error)

    def _take(self) -> int | None:
        with self._lock:
            return None if self.errors else next(self._left, None)
