"""Starts, watches and ends the processes of a run.

A supervisor keeps signals blocked and takes them one at a time, so it starts its children with an
empty signal mask. It is the *subreaper* of the processes that it starts: it inherits those whose
parent died. So `descendants` can find all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

SAFE_PATH: Final = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"
"""First of the code of `python -c`: what it imports comes from no working directory. That is what
`python -P` does, which Python 3.10 lacks."""

_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02
_FORK_WAITS_S: Final = 1.0
_FORK_POLL_S: Final = 0.0005


def become_subreaper() -> None:
    """Inherit orphaned descendants (Linux, prctl(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start_child_process(
    path: str, command: tuple[str, ...], environment: Mapping[str, str], *, own_group: bool
) -> int:
    """Start `command` with this process's stdin, stdout and stderr and no blocked signals. Returns
    its pid.

    `own_group` False: it shares this process's group, so that it may read from the terminal.
    Raises OSError if the program cannot be executed.
    """
    # Python ignores these two signals, and ignored signals stay ignored across exec
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    if own_group:
        return os.posix_spawn(
            path, command, environment, setpgroup=0, setsigmask=(), setsigdef=defaults
        )
    return os.posix_spawn(path, command, environment, setsigmask=(), setsigdef=defaults)


def shell_code(wait_status: int) -> int:
    """The exit code as a shell gives it: 128 + n for a death by signal n."""
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code


def take_signal(
    signals: frozenset[signal.Signals], timeout_s: float
) -> signal.struct_siginfo | None:
    """The next of these blocked signals; None if none comes in time.

    CPython 3.11 returns what memory held, if the process was stopped (Ctrl-Z) while it waited and
    goes on after `timeout_s`.
    """
    information = signal.sigtimedwait(signals, timeout_s)
    known = information is not None and information.si_signo in signals
    return information if known else None


def reap_children() -> dict[int, int]:
    """By pid, the shell codes of all children that have ended, including inherited ones."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = shell_code(wait_status)


def send_signal(pid: int, number: int) -> None:
    """Send a signal. A process that is already gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Process(NamedTuple):
    """A process that need not be a child of this one. Its start time tells it from a later process
    with the same pid."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The live process `pid`, or None."""
        fields = process_stat(pid)
        return cls(pid, int(fields[19])) if fields is not None and _lives(fields) else None

    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return Process.of(self.pid) == self


def _lives(fields: Sequence[str]) -> bool:
    """Whether the process with these `process_stat` fields is alive.

    A zombie, which only waits for its parent, is not. A process whose first thread has ended is
    also in state Z, but is alive while num_threads (field 20) is above 1: SIGKILL ends its other
    threads only once they have given back their memory, and until then the process holds its files
    and has its children.
    """
    return fields[0] not in "ZX" or int(fields[17]) > 1


def process_stat(pid: int | str) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on (proc(5)), because the second may contain any
    text. `pid` "self": this process. None if the process is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def descendants(pid: int, *, spare: Iterable[int] = ()) -> tuple[Process, ...]:
    """The live descendants of `pid`, without those in `spare` and the descendants of these."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        fields = process_stat(int(name)) if name.isdigit() else None
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


def end_processes(
    find: Callable[[], tuple[Process, ...]], *, grace_s: float, hurry: threading.Event | None = None
) -> None:
    """End the processes that `find` returns, until it returns none.

    Each gets SIGTERM once, then SIGKILL after `grace_s` seconds or when `hurry` is set. An empty
    `find` is repeated once: a process may have started behind the first look, and its parent may
    have ended before that look reached it.
    """
    deadline = time.monotonic() + grace_s
    hurry = hurry or threading.Event()
    asked: set[Process] = set()
    while left := find() or find():
        late = hurry.is_set() or time.monotonic() > deadline
        for process in left:
            if late:
                send_signal(process.pid, signal.SIGKILL)
            elif process not in asked:
                send_signal(process.pid, signal.SIGTERM)
                asked.add(process)
        time.sleep(_POLL_S) if late else hurry.wait(_POLL_S)


def wait_gone(process: Process, *, timeout_s: float) -> bool:
    """Wait until a process is gone that need not be a child of this one. False: it is still there
    after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while process.alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Within this context, no garbage is collected. In a thread beside the one that trains: as
    short as possible, because a `gc.disable()` of the training within it is undone; and within
    `no_fork`, because a child would never collect."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- forks of a process with threads -------------------------------------------------------------
#
# fork(2) copies one thread, and all locks as they are at this moment. The first call of each
# operation of torch takes locks of the C library (__cxa_atexit) and of C++ (static variables),
# without the GIL. If a fork comes between, the child never gets them: a data loader's worker would
# hang at its first operation, and the training with it.

_threads_within: set[int] = set()
_forking_threads: set[int] = set()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Within this context, no other thread forks. For threads beside the one that trains, when
    they call torch; not to be nested.

    `os.fork()` waits at most a second for it, so that training goes on: waits and long copies
    belong outside.
    """
    thread, deadline = threading.get_ident(), time.monotonic() + _FORK_WAITS_S
    try:
        _threads_within.add(thread)
        while _forking_threads:
            _threads_within.discard(thread)
            if time.monotonic() > deadline:  # an exception came before `_after_fork`
                _forking_threads.clear()
            time.sleep(_FORK_POLL_S)
            _threads_within.add(thread)
        yield
    finally:
        _threads_within.discard(thread)


def _before_fork() -> None:
    thread, deadline = threading.get_ident(), time.monotonic() + _FORK_WAITS_S
    _forking_threads.add(thread)
    while _threads_within - {thread} and time.monotonic() < deadline:
        time.sleep(_FORK_POLL_S)


def _after_fork() -> None:
    _forking_threads.discard(threading.get_ident())


def _after_fork_in_child() -> None:
    _threads_within.clear()
    _forking_threads.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
