"""The sidecar as a service of one run: started, found again, replaced, ended."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from keepstep.errors import SidecarError, UsageError
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.processes import Process, spawn_service, wait_gone
from keepstep_sidecar.cli.run_dir import Options, Places, Service, load_service, make_memory
from keepstep_sidecar.config.archive import of_plain
from keepstep_sidecar.config.peers import of_plain as peers_of_plain

UP_S: Final = 30.0
"""A sidecar that does not answer by then has failed to start."""

DRAIN_S: Final = 600.0
"""Long, as two steps of a large model may have to reach a slow volume; Ctrl-C ends the wait."""

LOG_LIMIT_BYTES: Final = 16 << 20
_GONE_S: Final = 15.0
_POLL_S: Final = 0.02
_TAIL_BYTES: Final = 2000


@contextlib.contextmanager
def supervising(places: Places) -> Iterator[None]:
    """Be the one supervisor of the run. Raises UsageError naming the other one."""
    fd = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, places)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, places: Places) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        raise UsageError(
            f"run {places.run!r} is active: `keepstep run` with pid {pid} supervises it; end it"
            " first, or give this one another name with --run"
        ) from None


def sidecar_arguments(service: Service) -> tuple[str, ...]:
    """What follows the interpreter on the sidecar's command line."""
    places, options = service.places, service.options
    words = ["-m", "keepstep_sidecar", "--run", places.run, "--memory-dir", str(places.memory)]
    for volume in places.volumes:
        words += ["--volume", str(volume)]
    values = {
        "--slots": options.slots,
        "--memory-limit": options.memory_limit_bytes,
        "--stage-every": options.stage_every,
        "--persist-every": options.persist_every,
        "--keep": options.keep,
        "--keep-every": options.keep_every,
        "--capacity": options.capacity_bytes,
        "--linger": options.linger_s,
        "--owner-pid": os.getpid(),
        "--restore-from": options.restore_from or None,
        "--restore-since": options.restore_since or None,
        **_archive_values(options),
    }
    for name, value in values.items():
        if value is not None:
            words += [name, str(value)]
    peers = peers_of_plain(options.peers)
    return (*words, *(peers.arguments() if peers is not None else ()))


def _archive_values(options: Options) -> dict[str, object]:
    if (archive := of_plain(options.archive)) is None:
        return {}
    keep = archive.retention
    return {
        "--archive": archive.url,
        "--archive-every": archive.every,
        "--archive-keep": keep.last,
        "--archive-keep-every": keep.every,
        "--archive-endpoint": archive.endpoint,
        "--archive-region": archive.region,
    }


def launch(service: Service) -> int:
    """Start the sidecar; returns its pid at once. Raises UsageError, OSError."""
    make_memory(service.places)
    bound_log(service.places.log)
    return spawn_service(sidecar_arguments(service), log=service.places.log)


def wait_up(places: Places, process: Process | None, *, timeout_s: float = UP_S) -> bool:
    """Wait until the sidecar answers; False when `process` died first or time ran out."""
    deadline = time.monotonic() + timeout_s
    while not calls.answers(places.socket):
        if time.monotonic() > deadline or (process is not None and not process.alive()):
            return False
        time.sleep(_POLL_S)
    return True


def adopt(service: Service) -> Process | None:
    """A sidecar that lingers from an earlier life of this run; None when there is none.

    One that was started with other options is ended first; its memory stays for its successor.
    Raises SidecarError.
    """
    places = service.places
    live = calls.status(places.socket)
    if live is None:
        return None
    process = Process.of(live.pid)
    if process is not None and _as_recorded(service):
        with contextlib.suppress(SidecarError):  # an older one counts its linger as it always did
            calls.own(places.socket, os.getpid())
        return process
    # to make newer steps durable could retire the one to go back to
    drain = not service.options.restore_from
    calls.stop(places.socket, forget=False, drain=drain, timeout_s=DRAIN_S)
    _await_gone(process, places)
    return None


def _as_recorded(service: Service) -> bool:
    try:
        recorded = load_service(service.places.home.parent, service.places.run)
    except UsageError:
        return False
    # where things are must match too: the sidecar writes to the volumes that it was started with
    return dataclasses.asdict(recorded) == dataclasses.asdict(service)


def end(places: Places, *, timeout_s: float = DRAIN_S) -> bool:
    """Flush, stop the sidecar and free its memory; False when there is none.

    Raises SidecarError when it does not end.
    """
    live = calls.status(places.socket)
    process = None if live is None else Process.of(live.pid)
    if live is None or not calls.stop(places.socket, forget=True, timeout_s=timeout_s):
        return False
    _await_gone(process, places)
    return True


def _await_gone(process: Process | None, places: Places) -> None:
    if process is not None and not wait_gone(process, timeout_s=_GONE_S):
        raise SidecarError(
            f"the sidecar (pid {process.pid}) does not end; see {places.log}, then kill it",
            code="stopping",
        )


def slots_left(places: Places) -> bool:
    """Whether shared memory holds slots of this run, with or without a sidecar."""
    return any(places.memory.glob("rank-*"))


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
