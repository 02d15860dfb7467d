"""Only one process writes to a volume: an advisory lock that the kernel drops at its death."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from keepstep.errors import StorageError


class Ownership:
    """Holds `path` locked from construction to `release`.

    Raises StorageError naming the owner's pid when somebody else holds it, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise StorageError(
                f"{path.parent}: in use by the sidecar with pid {owner}; stop it (keepstep stop), "
                "or use another directory or run name"
            ) from error
        with contextlib.suppress(OSError):  # a full disk is no reason: the pid is for people
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
