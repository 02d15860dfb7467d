"""Windows: shared memory in which verified chunks reach a trainer that cannot map an image.

A window lives for one restore of one lease and must not outlive the sidecar. So windows found at
the start are removed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path

from keepstep.errors import NoMemoryError
from keepstep.image.xxh3 import CHUNK_BYTES
from keepstep_sidecar.memory.slot_file import populate

_PREFIX = "window-"
LEAST_FRAMES = 2
"""One frame is filled while the other is read."""
MOST_FRAMES = 64


class ChunkBuffer:
    """A window: `frames` frames of `CHUNK_BYTES` each, mapped. Make and close it on a thread or on
    the event loop."""

    def __init__(self, path: Path, frames: int) -> None:
        """Blocks while memory is allocated. Raises NoMemoryError when there is too little."""
        self.path = path
        self.frames = frames
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o660)
        try:
            os.posix_fallocate(fd, 0, self.size_bytes)
            self._mapping = mmap.mmap(fd, self.size_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise NoMemoryError(
                f"{path.parent}: no room for a window of {self.size_bytes} bytes"
                f" ({error.strerror}); raise --memory-limit or give the tmpfs more memory",
                code="no-memory",
            ) from error
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)
        populate(self._view, threading.Event())

    @property
    def size_bytes(self) -> int:
        return self.frames * CHUNK_BYTES

    def frame(self, number: int, size_bytes: int) -> memoryview:
        """The first `size_bytes` of a frame. Raises IndexError when there is no such frame."""
        if not 0 <= number < self.frames:
            raise IndexError(f"frame {number} of a window of {self.frames}")
        begin = number * CHUNK_BYTES
        return self._view[begin : begin + size_bytes]

    def close(self) -> None:
        """Remove the file. Its memory is free once no process maps it any more. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._view.release()
        with contextlib.suppress(BufferError):  # a read still fills a frame and keeps the mapping
            self._mapping.close()


def buffer_path(memory_dir: Path, rank: int, token: str) -> Path:
    """The path of the window of one restore of one lease."""
    return memory_dir / f"{_PREFIX}{rank:05d}-{token}"


def sweep(memory_dir: Path) -> None:
    """Remove the windows that an earlier sidecar left. Of a link, only the name is removed."""
    for path in memory_dir.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # a directory, which no sidecar made
            path.unlink()
