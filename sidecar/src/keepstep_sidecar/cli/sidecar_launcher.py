"""Starts, finds, replaces and ends the sidecar of one run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from keepstep.directory import OpenDirectory
from keepstep.errors import SidecarAbsent, SidecarError, UsageError
from keepstep.processes import Process, wait_gone
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.probe import is_answering
from keepstep_sidecar.cli.run_dir import (
    RunDir,
    check_own,
    is_record_current,
    make_memory,
    save_record,
)
from keepstep_sidecar.config.sidecar import SETTINGS
from keepstep_sidecar.volume.run_tree import RECORD

UP_S: Final = 30.0
"""A sidecar that has not answered after this time has failed to start."""

DRAIN_S: Final = 600.0
"""This is long because two steps of a large model may have to reach a slow volume. Ctrl-C ends the
wait."""

LOG_LIMIT_BYTES: Final = 16 << 20
_GONE_S: Final = 15.0
_POLL_S: Final = 0.02
_NOTICED_S: Final = 5.0
"""How long a sidecar may take to notice that its directory was removed, and to end."""
_TAIL_BYTES: Final = 2000


@contextlib.contextmanager
def hold_supervision(kept: RunDir, *, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold the run's lock as its only supervisor. Raises UsageError that names the other supervisor
    if the lock is not free within `timeout_s`."""
    try:
        home = OpenDirectory.open_path(kept.home)
        check_own(home)
        fd = home.open_file(kept.lock.name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    pid = os.pread(fd, 32, 0).decode(errors="replace").partition("\n")[0]
                    raise UsageError(
                        f"run {kept.name!r} is active: a keepstep command with pid {pid} supervises"
                        " it; end it first, or give this one another name with --run"
                    ) from None
            time.sleep(_POLL_S)
        # keep the line of an earlier supervisor's command: `_orphaned` reads it
        command = os.pread(fd, 128, 0).partition(b"\n")[2]
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode() + command, 0)
        yield
    finally:
        os.close(fd)


def record_command_pid(kept: RunDir, pid: int) -> None:
    """Write the pid of the command to the lock file, after the supervisor's: the command may
    outlive the supervisor."""
    process = Process.of(pid)
    started = 0 if process is None else process.started
    with contextlib.suppress(OSError):  # only messages use it
        fd = OpenDirectory.open_path(kept.home).open_file(kept.lock.name, os.O_WRONLY | os.O_TRUNC)
        with open(fd, "w") as file:
            file.write(f"{os.getpid()}\n{pid} {started}\n")


def _orphaned(kept: RunDir) -> Process | None:
    """The command that a killed supervisor left, if it still lives."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        data = OpenDirectory.open_path(kept.home).read(kept.lock.name, most_bytes=_TAIL_BYTES)
        pid, started = data.decode().splitlines()[1].split()
        process = Process(int(pid), int(started))
        return process if process.alive() else None
    return None


def launch_sidecar(kept: RunDir) -> int:
    """Start the sidecar; returns its pid at once. It outlives this process: it has a session of its
    own, no stdin, and its output is appended to the log. Raises UsageError, OSError."""
    make_memory(kept.memory)
    limit_log(kept.log)
    save_record(kept)
    # -P: no module of the directory in which the training starts is imported (Python's manual)
    words = ("-P", "-m", "keepstep_sidecar", "serve", "--config", str(kept.record))
    owner = ("--owner-pid", str(os.getpid()))
    settings = {
        setting.variable for setting in SETTINGS
    }  # the file has them; they would override it
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = OpenDirectory.open_path(kept.home).open_file(kept.log.name, flags, 0o644)
    try:
        return os.posix_spawn(
            sys.executable,
            (sys.executable, *words, *owner),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
        )
    finally:
        os.close(log)


def wait_for_sidecar(kept: RunDir, process: Process | None, *, timeout_s: float = UP_S) -> bool:
    """Wait until the sidecar answers. Returns False if `process` dies first, or after
    `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_answering(kept.socket):
        if time.monotonic() > deadline or (process is not None and not process.alive()):
            return False
        time.sleep(_POLL_S)
    return True


def adopt_sidecar(kept: RunDir) -> Process | None:
    """The sidecar that an earlier life of this run left, if it has the same options.

    Returns None if there is no sidecar. Ends a sidecar that has other options, leaves its memory
    for the successor, and returns None. Raises SidecarError.
    """
    live = calls.ask_status(kept.socket)
    if live is None:
        return None
    process = Process.of(live.pid)
    if process is not None and is_record_current(kept):
        calls.register_owner_process(kept.socket, os.getpid())
        return process
    # making newer steps durable could retire the step that --restore-from names
    drain = not kept.config.restore_from
    with contextlib.suppress(SidecarAbsent):  # it was about to end, as in a job that goes on
        calls.ask_stop(kept.socket, forget=False, drain=drain, timeout_s=DRAIN_S)
    _await_gone(process, kept)
    return None


def free_removed(kept: RunDir, *, orphans: bool) -> bool:
    """Free what an earlier run of this name left in memory, if its directory was removed: a new
    directory begins a new run. Returns whether there was anything. Call it before `make_home`.

    `orphans`: also slots without a sidecar. Raises SidecarError.
    """
    if kept.record.exists() or any((root / RECORD).exists() for root in kept.roots):
        return False
    live = calls.ask_status(kept.socket)
    if live is None:
        return orphans and _remove_memory(kept)
    # the sidecar itself knows whether the directory was removed, its drive is away, or it is in use
    held, process = has_leftover_slots(kept), Process.of(live.pid)
    if process is not None and not wait_gone(process, timeout_s=_NOTICED_S):
        return False
    return _remove_memory(kept) or held


def _remove_memory(kept: RunDir) -> bool:
    """Remove the directories of a run's memory, which no sidecar has, unless another user owns
    them. Returns whether slots were there."""
    held = has_leftover_slots(kept)
    for place in filter(None, (kept.memory, kept.config.huge_pages_dir)):
        with contextlib.suppress(OSError):
            found = place.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                shutil.rmtree(place)
    return held


def require_idle_or_same(kept: RunDir) -> None:
    """Raises UsageError if the run is training with other options than those of `kept`: the
    sidecar must not be replaced while it has a trainer."""
    if (pids := list_trainer_pids(kept)) and not is_record_current(kept):
        raise UsageError(f"run {kept.name!r} is training with other options {_to_end(kept, pids)}")


def require_idle(kept: RunDir, *, timeout_s: float = 0.0) -> None:
    """Wait until the run has no trainer. Raises UsageError if it still has one after `timeout_s`,
    which gives dying trainers time to end."""
    deadline = time.monotonic() + timeout_s
    while pids := list_trainer_pids(kept):
        if time.monotonic() >= deadline:
            raise UsageError(f"run {kept.name!r} is training {_to_end(kept, pids)}")
        time.sleep(_POLL_S)


def _to_end(kept: RunDir, trainers: Sequence[int]) -> str:
    """The part of a message that names who trains, and the `kill` that ends it. It names both the
    orphaned command and its trainers: a killed shell would leave its trainer, and a launcher would
    start a killed trainer again."""
    orphan = _orphaned(kept)
    first = () if orphan is None else (orphan.pid,)
    pids = " ".join(map(str, dict.fromkeys((*first, *trainers))))
    killed = "" if orphan is None else ", whose `keepstep run` was killed"
    return (
        f"(pid {pids}{killed}); end that first, with `kill {pids}`, or give this one another name"
        " with --run"
    )


def list_trainer_pids(kept: RunDir) -> tuple[int, ...]:
    """The pids of the live trainers that the run's sidecar serves."""
    live = calls.ask_status(kept.socket)
    return () if live is None else tuple(rank.pid for rank in live.ranks if rank.alive)


def end_sidecar(kept: RunDir) -> bool:
    """Flush, stop the sidecar and free its memory. Returns False if there is no sidecar.

    Raises SidecarError if the sidecar does not end.
    """
    live = calls.ask_status(kept.socket)
    process = None if live is None else Process.of(live.pid)
    if live is None or not calls.ask_stop(kept.socket, forget=True, timeout_s=DRAIN_S):
        return False
    _await_gone(process, kept)
    return True


def _await_gone(process: Process | None, kept: RunDir) -> None:
    if process is not None and not wait_gone(process, timeout_s=_GONE_S):
        raise SidecarError(
            f"the sidecar (pid {process.pid}) does not end; see {kept.log}, then kill it",
            code="stopping",
        )


def has_leftover_slots(kept: RunDir) -> bool:
    """Whether shared memory holds slots of this run, with or without a sidecar."""
    roots = filter(None, (kept.memory, kept.config.huge_pages_dir))
    return any(found for root in roots for found in root.glob("rank-*"))


def file_identity(path: Path) -> tuple[int, int] | None:
    """The device and inode of `path`; None if nothing is there. If they differ later, the file or
    directory was removed meanwhile."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def limit_log(path: Path) -> None:
    """Copy a log that has grown large to `<name>.1`, and cut it.

    The log is not renamed, because a live sidecar goes on appending to the file that it has open.
    Lines written between copy and cut are lost. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        directory = OpenDirectory.open_path(path.parent)
        fd = directory.open_file(path.name, os.O_RDWR)
        try:
            if (size_bytes := os.fstat(fd).st_size) > LOG_LIMIT_BYTES:
                directory.write(f"{path.name}.1", os.pread(fd, size_bytes, 0), 0o644)
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def log_tail(path: Path) -> str:
    """The end of the log, for an error message."""
    try:
        fd = OpenDirectory.open_path(path.parent).open_file(path.name, os.O_RDONLY)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        file.seek(max(0, os.fstat(fd).st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace").strip()
