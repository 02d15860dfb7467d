"""One interface for every way to save: what the training thread calls, and when it is durable.

A saver's `save` returns when training may go on, `fence` when the tensors may change, and
`wait_durable` when the bytes are on media and flushed. If a peer does not flush, its saver here
does.
"""

from __future__ import annotations

import abc
import os
import shutil
from pathlib import Path
from typing import ClassVar

from bench.state import State


class Saver(abc.ABC):
    """A way to save `state` below `directory`; made once, used for many steps."""

    name: ClassVar[str]
    note: ClassVar[str] = ""
    blocking: ClassVar[bool] = False
    """Whether a step is durable when `save` returns: nothing runs in the background."""

    def __init__(self, state: State, directory: Path) -> None:
        self.state = state
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @abc.abstractmethod
    def save(self, step: int) -> None:
        """Begin to save, once the previous save is durable."""

    def fence(self) -> None:  # noqa: B027  (most savers copy before `save` returns)
        """Return when the tensors may change."""

    def wait_ready(self) -> None:  # noqa: B027  (most savers make nothing in the background)
        """Return when all preparation is done; called after a first save."""

    def wait_staged(self) -> None:  # noqa: B027  (most savers have no such state)
        """Return when the step no longer depends on the training process's tensors."""

    def wait_durable(self) -> None:  # noqa: B027  (blocking savers are durable already)
        """Return when the last saved step is on media and flushed."""

    def background_cpu_s(self) -> float:
        """CPU seconds of helper processes alone, which this process's tree includes, too."""
        return 0.0

    def extra(self) -> dict[str, float]:
        """Further figures, asked for at the end."""
        return {}

    def close(self) -> None:
        """End everything and delete the files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def path(self, step: int) -> Path:
        """The path to which this step is saved."""
        return self.directory / f"step-{step:06d}"


def fsync(path: Path) -> None:
    """Flush one file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: Path) -> None:
    """Flush every file below `path`, every directory, and the directory that names it."""
    for base, _, files in os.walk(path):
        for name in files:
            fsync(Path(base) / name)
        fsync(Path(base))
    fsync(path.parent)
