"""The sidecar as a service of one run: started, found again, replaced, ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from keepstep.errors import SidecarError, UsageError
from keepstep.processes import Process, wait_gone
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.run_dir import RunDir, load, make_memory, save
from keepstep_sidecar.config.sidecar import KEYS

UP_S: Final = 30.0
"""A sidecar that does not answer by then has failed to start."""

DRAIN_S: Final = 600.0
"""Long, as two steps of a large model may have to reach a slow volume; Ctrl-C ends the wait."""

LOG_LIMIT_BYTES: Final = 16 << 20
_GONE_S: Final = 15.0
_POLL_S: Final = 0.02
_TAIL_BYTES: Final = 2000


@contextlib.contextmanager
def supervising(kept: RunDir, *, timeout_s: float = 0.0) -> Iterator[None]:
    """Be the one supervisor of the run, after `timeout_s` at the latest. Raises UsageError naming
    the other one."""
    fd = os.open(kept.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                _lock(fd, kept)
                break
            except UsageError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_S)
        # that of a supervisor before, see `_orphaned`
        command = os.pread(fd, 128, 0).partition(b"\n")[2]
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode() + command, 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, kept: RunDir) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").partition("\n")[0]
        raise UsageError(
            f"run {kept.run!r} is active: a keepstep command with pid {pid} supervises it; end it"
            " first, or give this one another name with --run"
        ) from None


def note_command(kept: RunDir, pid: int) -> None:
    """Beside the supervisor's pid: the command that it runs, which may outlive it."""
    process = Process.of(pid)
    with contextlib.suppress(OSError), kept.lock.open("w") as file:  # nothing hangs on it
        started = 0 if process is None else process.started
        file.write(f"{os.getpid()}\n{pid} {started}\n")


def _orphaned(kept: RunDir) -> Process | None:
    """The command of a supervisor that was killed, while it lives."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid, started = kept.lock.read_text().splitlines()[1].split()
        process = Process(int(pid), int(started))
        return process if process.alive() else None
    return None


def launch(kept: RunDir) -> int:
    """Start the sidecar; returns its pid at once. Raises UsageError, OSError."""
    make_memory(kept.memory)
    bound_log(kept.log)
    save(kept)
    words = ("-m", "keepstep_sidecar", "serve", "--config", str(kept.record))
    owner = ("--owner-pid", str(os.getpid()))
    settings = {key.variable for key in KEYS}  # counted already, and would count before the file
    environment = {name: one for name, one in os.environ.items() if name not in settings}
    return _spawn_service((*words, *owner), environment, log=kept.log)


def _spawn_service(arguments: Sequence[str], environment: Mapping[str, str], *, log: Path) -> int:
    """Start this Python with `arguments`, as a process that outlives us: own session, no stdin,
    output appended to `log`. Returns its pid. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(
        sys.executable,
        (sys.executable, *arguments),
        environment,
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    )


def wait_up(kept: RunDir, process: Process | None, *, timeout_s: float = UP_S) -> bool:
    """Wait until the sidecar answers; False when `process` died first or time ran out."""
    deadline = time.monotonic() + timeout_s
    while not calls.answers(kept.socket):
        if time.monotonic() > deadline or (process is not None and not process.alive()):
            return False
        time.sleep(_POLL_S)
    return True


def adopt(kept: RunDir) -> Process | None:
    """A sidecar that lingers from an earlier life of this run; None when there is none.

    One that was started with other options is ended first; its memory stays for its successor.
    Raises SidecarError.
    """
    live = calls.status(kept.socket)
    if live is None:
        return None
    process = Process.of(live.pid)
    if process is not None and _as_recorded(kept):
        with contextlib.suppress(SidecarError):  # an older one counts its linger as it always did
            calls.own(kept.socket, os.getpid())
        return process
    # to make newer steps durable could retire the one to go back to
    drain = not kept.config.restore_from
    calls.stop(kept.socket, forget=False, drain=drain, timeout_s=DRAIN_S)
    _await_gone(process, kept)
    return None


def require_idle_or_same(kept: RunDir) -> None:
    """Nobody takes a sidecar from a trainer to give it other options. Raises UsageError."""
    if (pids := trainers_of(kept)) and not _as_recorded(kept):
        raise UsageError(f"run {kept.run!r} is training with other options {_to_end(kept, pids)}")


def require_idle(kept: RunDir, *, timeout_s: float = 0.0) -> None:
    """Nobody takes a sidecar from a trainer, but one that is just dying. Raises UsageError."""
    deadline = time.monotonic() + timeout_s
    while pids := trainers_of(kept):
        if time.monotonic() >= deadline:
            raise UsageError(f"run {kept.run!r} is training {_to_end(kept, pids)}")
        time.sleep(_POLL_S)


def _to_end(kept: RunDir, trainers: Sequence[int]) -> str:
    """Who trains, and the command that ends it: a shell would leave its trainer, and a launcher
    start it again."""
    orphan = _orphaned(kept)
    first = () if orphan is None else (orphan.pid,)
    pids = " ".join(map(str, dict.fromkeys((*first, *trainers))))
    killed = "" if orphan is None else ", whose `keepstep run` was killed"
    return (
        f"(pid {pids}{killed}); end that first, with `kill {pids}`, or give this one another name"
        " with --run"
    )


def trainers_of(kept: RunDir) -> tuple[int, ...]:
    """The pids of the trainers that its sidecar serves now."""
    live = calls.status(kept.socket)
    return () if live is None else tuple(one.pid for one in live.ranks if one.alive)


def _as_recorded(kept: RunDir) -> bool:
    try:
        return load(kept.home.parent, kept.run) == kept
    except UsageError:
        return False


def end(kept: RunDir, *, timeout_s: float = DRAIN_S) -> bool:
    """Flush, stop the sidecar and free its memory; False when there is none.

    Raises SidecarError when it does not end.
    """
    live = calls.status(kept.socket)
    process = None if live is None else Process.of(live.pid)
    if live is None or not calls.stop(kept.socket, forget=True, timeout_s=timeout_s):
        return False
    _await_gone(process, kept)
    return True


def _await_gone(process: Process | None, kept: RunDir) -> None:
    if process is not None and not wait_gone(process, timeout_s=_GONE_S):
        raise SidecarError(
            f"the sidecar (pid {process.pid}) does not end; see {kept.log}, then kill it",
            code="stopping",
        )


def slots_left(kept: RunDir) -> bool:
    """Whether shared memory holds slots of this run, with or without a sidecar."""
    roots = filter(None, (kept.memory, kept.config.huge_pages_dir))
    return any(found for root in roots for found in root.glob("rank-*"))


def identity(path: Path) -> tuple[int, int] | None:
    """What has this name now; None for nothing. Another one later: it was removed meanwhile."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def bound_log(path: Path) -> None:
    """Move a log that has grown large to `<name>.1` and empty it.

    It is copied, not renamed: a live sidecar goes on appending to the file that it has open.
    Lines that come between copy and truncation are lost.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_LIMIT_BYTES:
            path.with_name(f"{path.name}.1").write_bytes(path.read_bytes())
            os.truncate(path, 0)


def log_tail(path: Path) -> str:
    """The end of the log, for an error message."""
    try:
        return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
