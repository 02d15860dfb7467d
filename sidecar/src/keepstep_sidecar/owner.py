"""The process for which a sidecar runs (`keepstep run`): while it lives, nobody has left.

A training command may need long before its first lease; a sidecar that counted that time as being
abandoned would end under it.
"""

from __future__ import annotations

import asyncio
import os

from keepstep_sidecar.changes import Changes


class Owner:
    """Watches at most one process, the newest that was named, by its pidfd."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pidfd: int | None = None

    @property
    def present(self) -> bool:
        """Whether there is such a process, and it lives."""
        return self._pidfd is not None

    def watch(self, pid: int) -> None:
        """From now on this process. One that is gone already counts as none."""
        self.leave()
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):  # no process has such a number
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self.leave)
        self._changes.ring()

    def leave(self) -> None:
        """There is no owner any more. Idempotent."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
            self._changes.ring()
