"""The right to a memory directory: one sidecar at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from keepstep.errors import StorageError, UsageError
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.memory.slot_file import make_way
from keepstep_sidecar.volume.volume import Ownership

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryLock:
    """This process's right to the memory directory: one sidecar at a time.

    Trainers can write there too, so a name may be a link to one of the sidecar's files. Therefore
    no link is followed, and files are replaced, never rewritten.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = config.memory_dir
        self._lock: Ownership | None = None
        self._above: int | None = None

    def take(self) -> None:
        """Own the directory, which is made if need be, and the name of the socket. Raises
        UsageError if another sidecar owns the directory (the message names it), or if this user
        cannot use it."""
        try:
            self._directory.mkdir(mode=0o770, parents=True, exist_ok=True)
            self._check_owner()
            self._own(self._directory / "sidecar.pid")
            self._describe(self._directory / "sidecar.json")
            make_way(self._config.socket)
        except OSError as error:
            text = f"cannot use the memory directory {self._directory}: {error}"
            raise UsageError(text) from error

    def _check_owner(self) -> None:
        """Raises PermissionError if the parent directory has become another user's: that user could
        have made the directory anew after it was removed."""
        above = self._directory.parent.stat().st_uid
        if self._above not in (None, above) and above != os.geteuid():
            raise PermissionError(errno.EPERM, f"{self._directory.parent} is another user's now")
        self._above = above

    @property
    def held(self) -> bool:
        """Whether this process holds the lock, so that no other sidecar can take it."""
        return self._lock is not None and self._lock.held

    def _own(self, path: Path) -> None:
        if self.held:
            return
        make_way(path, keep_own=True)
        try:
            taken = Ownership(path)
        except StorageError as error:
            raise UsageError(f"the memory directory {error}") from error
        if self._lock is not None:
            self._lock.release()
        self._lock = taken

    def _describe(self, path: Path) -> None:
        about = {"config": asdict(self._config), "pid": os.getpid(), "started_at": time.time()}
        unfinished = path.with_name(f".{path.name}.new")
        make_way(unfinished)
        with os.fdopen(os.open(unfinished, _CREATE, 0o660), "w") as file:
            json.dump(about, file, default=str, indent=1)
        make_way(path, keep_own=True)
        unfinished.replace(path)

    def leave(self) -> None:
        """Remove our files; also the directory, when no slots are left in it."""
        left = any(self._directory.glob("rank-*"))
        for name in ("sidecar.sock", "sidecar.pid", *(() if left else ("sidecar.json",))):
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()
        if self._lock is not None:
            self._lock.release()
        if not left and not os.path.ismount(self._directory):
            with contextlib.suppress(OSError):  # it holds other files
                self._directory.rmdir()
