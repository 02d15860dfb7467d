"""Only one process writes to a directory: an advisory lock that the kernel drops at its death."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from keepstep.errors import StorageError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Ownership:
    """Holds `path` locked from construction to `release`.

    `path` is a file of its own: a link, or one with other names, is never written to. Raises
    StorageError naming the owner's pid when somebody else holds it, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, _FLAGS, 0o640)
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise OSError(errno.EINVAL, "not a file of its own: remove it", str(path))
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise StorageError(
                f"{path.parent}: in use by a sidecar that is running (pid {owner}); stop it"
                " (keepstep stop), or use another directory or run name"
            ) from error
        except BaseException:
            self.release()
            raise
        with contextlib.suppress(OSError):  # a full disk is no reason: the pid is for people
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @property
    def held(self) -> bool:
        """Whether the file is still there: without it another process could come. Raises OSError
        when that cannot be told."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), found)

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
