"""Processes of a run: how they are started, watched and ended.

Signals stay blocked in a supervisor and are taken one at a time, so its children are started with
an empty mask. As the *subreaper* of what it starts, it inherits processes whose parent died, which
is how `descendants` can find all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02


def become_subreaper() -> None:
    """Inherit orphaned descendants (Linux, prctl(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def spawn_command(
    path: str, command: tuple[str, ...], environment: Mapping[str, str], *, own_group: bool
) -> int:
    """Start `command` with our stdin, stdout and stderr and no signal blocked; returns its pid.

    `own_group` False: it shares our process group, so that it may read from the terminal.
    Raises OSError when the program cannot be executed.
    """
    # Python ignores these two, and what is ignored stays so across exec
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    if own_group:
        return os.posix_spawn(
            path, command, environment, setpgroup=0, setsigmask=(), setsigdef=defaults
        )
    return os.posix_spawn(path, command, environment, setsigmask=(), setsigdef=defaults)


def shell_code(wait_status: int) -> int:
    """Exit code as a shell gives it: 128 + n for death by signal n."""
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code


def reap() -> dict[int, int]:
    """Shell codes of all children (inherited ones too) that have ended, by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = shell_code(wait_status)


def send(pid: int, number: int) -> None:
    """Send a signal; a process that is gone already is none of our worries."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True)
class Process:
    """A process that is not our child, told from a later one with its pid by its start time."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The live process `pid`; None when there is none."""
        fields = stat(pid)
        return cls(pid, int(fields[19])) if fields is not None and _lives(fields) else None

    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return Process.of(self.pid) == self


def _lives(fields: Sequence[str]) -> bool:
    """Not while only a parent is to hear of its end. A process whose first thread has ended looks
    so, too (num_threads, field 20, tells): SIGKILL ends the others when they have given back their
    memory, and until then it holds its files and has its children."""
    return fields[0] not in "ZX" or int(fields[17]) > 1


def stat(pid: int | str) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on (proc(5)), as the second may hold anything; `self`
    is this process. None for one that is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def descendants(pid: int, *, spare: Iterable[int] = ()) -> tuple[Process, ...]:
    """Live processes below `pid`, without those in `spare` and what is below them."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        fields = stat(int(name)) if name.isdigit() else None
        if fields is not None and _lives(fields):
            child = Process(int(name), int(fields[19]))
            children.setdefault(int(fields[1]), []).append(child)
    spared, found, todo = frozenset(spare), list[Process](), [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child.pid not in spared:
                found.append(child)
                todo.append(child.pid)
    return tuple(found)


def end_all(
    find: Callable[[], tuple[Process, ...]], *, grace_s: float, hurry: threading.Event | None = None
) -> None:
    """End what `find` finds, until that is nothing: SIGTERM once each, then SIGKILL, once `grace_s`
    are over or `hurry` is set. It looks twice: a process may have begun behind the first look, and
    its parent have ended before it."""
    deadline = time.monotonic() + grace_s
    hurry = hurry or threading.Event()
    asked: set[Process] = set()
    while left := find() or find():
        late = hurry.is_set() or time.monotonic() > deadline
        for process in left:
            if late:
                send(process.pid, signal.SIGKILL)
            elif process not in asked:
                send(process.pid, signal.SIGTERM)
                asked.add(process)
        time.sleep(_POLL_S) if late else hurry.wait(_POLL_S)


def wait_gone(process: Process, *, timeout_s: float) -> bool:
    """Wait until a process that is not our child is gone; False when it is still there."""
    deadline = time.monotonic() + timeout_s
    while process.alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
