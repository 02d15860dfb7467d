"""`keepstep doctor`: whether this machine has what a run needs, without asking a sidecar.

Each check yields findings that say what to change. The checks change nothing: they write only the
file that measures a drive, and remove it. There is no check of the clock, because nothing on one
machine depends on it.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

import keepstep.version
from keepstep.image import HUGE_PAGE_BYTES
from keepstep.image.layout import CHUNK_BYTES, LEAST_ON_HUGE_PAGES_BYTES
from keepstep.steps import StrEnum
from keepstep_sidecar import __version__
from keepstep_sidecar.cli import output, run_dir
from keepstep_sidecar.cli.options import directory_option, json_option
from keepstep_sidecar.concurrency import for_each_chunk
from keepstep_sidecar.config.settings import format_duration, format_size, size_option
from keepstep_sidecar.config.sidecar import IO_THREADS
from keepstep_sidecar.memory.slot_allocator import SLOTS, SLOTS_ON_ONE_MACHINE
from keepstep_sidecar.memory.slot_directories import free_huge_bytes, huge_pages_advice
from keepstep_sidecar.memory.slot_file import may_swap
from keepstep_sidecar.volume import files
from keepstep_sidecar.volume.files import Filesystem, IoMode, aligned_buffer

SLOW_BYTES_PER_SECOND: Final = 200_000_000
"""A single SATA SSD is twice as fast. Anything slower is a hard disk, or behind a network."""

LEAST_SHARED_BYTES: Final = 256 << 20
"""The least free shared memory when the need is not known. Containers have 64 MiB by default."""

_IMAGES_ON_A_VOLUME = 3
"""The two newest committed steps, and the step that is being written."""

_LEAST_TORCH = (2, 6)
_SYSTEM_USERS = 1000
"""logind treats users with a smaller id as system users (login.defs), and keeps their memory."""


class Outcome(StrEnum):
    """`SLOW`: a run works, but slower or less safe than it could. `MISSING`: it would fail."""

    OK = "ok"
    SLOW = "slow"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """The result of a check. `change`: what to do; '' if there is nothing to do."""

    name: str
    outcome: Outcome
    found: str
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRequirements:
    """What a run needs of this machine. `image_bytes`: the size of one rank's image, None if
    unknown."""

    image_bytes: int | None
    ranks: int = 1
    slots: int = SLOTS_ON_ONE_MACHINE

    @property
    def memory_bytes(self) -> int | None:
        """Bytes for the slots of all ranks; None if the size of an image is unknown."""
        return None if self.image_bytes is None else self.image_bytes * self.ranks * self.slots

    def volume_bytes(self, volumes: int) -> int | None:
        """Bytes on each of so many volumes; None if the size of an image is unknown."""
        if self.image_bytes is None:
            return None
        return -(-self.ranks // volumes) * self.image_bytes * _IMAGES_ON_A_VOLUME


# --- versions --------------------------------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    """The versions of Python, torch and both halves of keepstep. torch is not imported."""
    yield Finding("python", Outcome.OK, platform.python_version())
    yield _torch()
    yield check_same_version(keepstep.version.__version__, __version__)


def check_same_version(library: str, sidecar: str) -> Finding:
    """Library and sidecar must be of one version."""
    found = f"library {library}, sidecar {sidecar}"
    if library == sidecar:
        return Finding("keepstep", Outcome.OK, found)
    return Finding("keepstep", Outcome.MISSING, found, "install both of one version")


def _torch() -> Finding:
    least = ".".join(map(str, _LEAST_TORCH))
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        change = f"pip install 'torch>={least}' where the training runs (a sidecar needs none)"
        return Finding("torch", Outcome.MISSING, "not installed for this Python", change)
    major, minor, *_ = (*found.split("."), "0")
    if (int(major), int(minor)) < _LEAST_TORCH:
        return Finding("torch", Outcome.MISSING, found, f"pip install 'torch>={least}'")
    return Finding("torch", Outcome.OK, found)


# --- memory ----------------------------------------------------------------------------------


def check_shared_memory(directory: Path, need: RunRequirements) -> Finding:
    """Whether shared memory has room for the slots. Free huge pages count, too."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        change = f"mount it: mount --mkdir -t tmpfs none {directory}"
        return Finding("shared memory", Outcome.MISSING, f"{directory}: {error.strerror}", change)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{directory}: {format_size(free)} free of {format_size(total)}"
    if not os.access(directory, os.W_OK):
        return Finding("shared memory", Outcome.MISSING, f"{found}, not writable", "chmod 1777 it")
    larger = f"mount -o remount,size=SIZE {directory}, in a container --shm-size"
    needed = need.memory_bytes
    if needed is None:
        outcome = Outcome.OK if free >= LEAST_SHARED_BYTES else Outcome.SLOW
        return Finding("shared memory", outcome, found, "" if outcome is Outcome.OK else larger)
    free += free_huge_bytes()
    if free >= needed:
        return Finding("shared memory", Outcome.OK, f"{found}, {format_size(needed)} needed")
    least = needed // need.slots
    outcome = Outcome.SLOW if free >= least else Outcome.MISSING
    found += f", {format_size(needed)} needed for {need.slots} slots, {format_size(least)} at least"
    return Finding("shared memory", outcome, found, f"{larger}, or fewer --slots")


def check_huge_pages(need: RunRequirements) -> Finding:
    """Whether enough huge pages are free. Slots are on small pages otherwise."""
    free, needed = free_huge_bytes(), need.memory_bytes or HUGE_PAGE_BYTES
    found = f"{format_size(free)} free"
    if need.image_bytes is not None and need.image_bytes < LEAST_ON_HUGE_PAGES_BYTES:
        return Finding("huge pages", Outcome.OK, f"{found}, images are too small for them")
    if need.memory_bytes is not None:
        found += f", {format_size(needed)} could be used"
    if free >= needed:
        return Finding("huge pages", Outcome.OK, found)
    change = (
        huge_pages_advice(needed)
        if need.memory_bytes is not None
        else "give --state SIZE to see how many"
    )
    return Finding("huge pages", Outcome.SLOW, found, change)


def check_memory_lock(need: RunRequirements) -> Finding:
    """Whether slots can be kept out of swap."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    found = "no limit" if unlimited else f"{format_size(limit)} may be locked"
    if not may_swap():
        return Finding("memlock", Outcome.OK, f"{found}; this machine does not swap")
    enough = unlimited or os.geteuid() == 0 or 0 < (need.memory_bytes or limit + 1) <= limit
    if enough:
        return Finding("memlock", Outcome.OK, found)
    change = "ulimit -l unlimited (memlock in /etc/security/limits.conf), swapoff -a, or huge pages"
    return Finding("memlock", Outcome.SLOW, f"{found}, and this machine swaps", change)


def check_remove_ipc(root: Path, uid: int) -> Finding:
    """Whether systemd removes the run's shared memory when user `uid` logs out (logind.conf(5),
    loginctl(1)). `root`: the root of the machine's file system."""
    name = "RemoveIPC"
    if not (root / "run/systemd/system").is_dir():
        return Finding(name, Outcome.OK, "no systemd here")
    if uid < _SYSTEM_USERS:
        return Finding(name, Outcome.OK, "logind leaves users of the system alone")
    if not _logind_removes(root):
        return Finding(name, Outcome.OK, "no")
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        user = pwd.getpwuid(uid).pw_name
        if (root / "var/lib/systemd/linger" / user).exists():
            return Finding(name, Outcome.OK, f"yes, but {user} lingers")
    change = "loginctl enable-linger, or RemoveIPC=no in /etc/systemd/logind.conf"
    return Finding(name, Outcome.SLOW, "yes: a logout empties /dev/shm under a run", change)


def _logind_removes(root: Path) -> bool:
    """Whether RemoveIPC is on: read the main files, then the drop-ins of all directories in the
    order of their names. The last value counts."""
    main = [root / "usr/lib/systemd/logind.conf", root / "etc/systemd/logind.conf"]
    drop_ins = {
        path.name: path
        for place in ("usr/lib", "run", "etc")
        for path in sorted((root / place / "systemd/logind.conf.d").glob("*.conf"))
    }
    removes = True
    for path in [*main, *(drop_ins[name] for name in sorted(drop_ins))]:
        parsed = configparser.ConfigParser(strict=False, interpolation=None)
        with contextlib.suppress(OSError, configparser.Error, ValueError, KeyError):
            parsed.read_string(path.read_text())
            removes = parsed.getboolean("Login", "RemoveIPC", fallback=removes)
    return removes


# --- drives ----------------------------------------------------------------------------------


def check_drive(
    directory: Path,
    need: RunRequirements,
    *,
    volumes: int,
    probe_bytes: int,
    clock: Callable[[], float],
) -> Iterator[Finding]:
    """Check space, O_DIRECT and speed of one volume. A file of at most `probe_bytes` is written,
    read and removed. If `directory` does not exist, its nearest existing parent is checked."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    filesystem = Filesystem()
    try:
        free, total = filesystem.free_bytes(place), filesystem.size_bytes(place)
        engine, why = files.probe_engine(filesystem, place)
    except OSError as error:
        change = "choose another directory, or make it writable for this user"
        yield Finding(f"drive {directory}", Outcome.MISSING, error.strerror or str(error), change)
        return
    yield _space(directory, free, total, need.volume_bytes(volumes))
    outcome = Outcome.OK if engine is IoMode.DIRECT else Outcome.SLOW
    change = (
        "" if engine is IoMode.DIRECT else "a local drive with ext4 or xfs: pages are copied here"
    )
    yield Finding(f"O_DIRECT {directory}", outcome, why, change)
    probe_bytes = min(probe_bytes, free // 4) // CHUNK_BYTES * CHUNK_BYTES
    if probe_bytes:
        yield _speed(directory, place, engine, probe_bytes, need, clock)


def _space(directory: Path, free: int, total: int, needed: int | None) -> Finding:
    name, found = f"space {directory}", f"{format_size(free)} free of {format_size(total)}"
    if free < max(needed or 0, CHUNK_BYTES):
        lacking = f", {format_size(needed or CHUNK_BYTES)} needed"
        return Finding(name, Outcome.MISSING, found + lacking, "free some, or another --volume")
    return Finding(name, Outcome.OK, found + (f", {format_size(needed)} needed" if needed else ""))


def _speed(
    directory: Path,
    place: Path,
    engine: IoMode,
    probe_bytes: int,
    need: RunRequirements,
    clock: Callable[[], float],
) -> Finding:
    name = f"speed {directory}"
    try:
        written, read = measure_drive_throughput(place, engine, probe_bytes, clock)
    except OSError as error:
        change = "look at the drive (dmesg), or choose another one"
        return Finding(name, Outcome.MISSING, error.strerror or str(error), change)
    found = f"{written / 1e6:.0f} MB/s written, {read / 1e6:.0f} MB/s read"
    if need.image_bytes is not None:
        seconds = need.image_bytes * need.ranks / written
        found += f"; a step of all ranks here takes {format_duration(max(0.1, seconds))}"
    if min(written, read) < SLOW_BYTES_PER_SECOND:
        change = "a local NVMe drive; several --volume are used side by side by several ranks"
        return Finding(name, Outcome.SLOW, found, change)
    return Finding(name, Outcome.OK, found)


def measure_drive_throughput(
    place: Path, engine: IoMode, size_bytes: int, clock: Callable[[], float] = time.monotonic
) -> tuple[float, float]:
    """Bytes per second written (and flushed), and read. Like a volume, it moves whole chunks, on
    as many threads. `size_bytes` is a multiple of a chunk. Raises OSError."""
    filesystem, path = Filesystem(), place / f".keepstep-doctor-{os.getpid()}"
    fd = filesystem.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | engine.open_flags)
    try:
        filesystem.unlink(path)  # nothing is left behind, whatever happens now
        filesystem.allocate(fd, size_bytes)
        count = size_bytes // CHUNK_BYTES
        with aligned_buffer(CHUNK_BYTES) as buffer, memoryview(buffer) as chunk:
            chunk[:] = os.urandom(1 << 20) * (CHUNK_BYTES >> 20)  # drives compress zeros
            began = clock()
            for_each_chunk(
                lambda at: filesystem.write(fd, chunk, at * CHUNK_BYTES), count, threads=IO_THREADS
            )
            filesystem.sync_data(fd)
            written = clock() - began
            files.forget_cache(fd)
            began = clock()
            for_each_chunk(
                # all threads read into one buffer: the bytes are not used
                lambda at: filesystem.read_into(fd, chunk, at * CHUNK_BYTES),
                count,
                threads=IO_THREADS,
            )
            read = clock() - began
    finally:
        filesystem.close_file(fd)
    return size_bytes / max(written, 1e-9), size_bytes / max(read, 1e-9)


@click.command()
@directory_option
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A drive that a run would have; several times.  [default: --dir]",
)
@size_option("--state", help="Of one rank: weights and optimizer.  [default: not known]")
@click.option("--ranks", type=click.IntRange(1), default=1, help="On this machine.  [default: 1]")
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=1,
    help="Machines of the run: with several, four images of each rank are in memory, on one three."
    "  [default: 1]",
)
@size_option("--probe-size", default="256Mi", help="Written to measure.  [default: 256Mi]")
@json_option
def doctor(
    directory: Path,
    volumes: tuple[Path, ...],
    state: int | None,
    ranks: int,
    nodes: int,
    probe_size: int,
    as_json: bool,
) -> None:
    """Check this machine: memory, huge pages, drives, versions; say what to change.

    Each line is `ok`, `slow` (a run works, but slower or less safe than it could) or `missing` (it
    would fail); exit code 1 when anything is missing. Nothing is changed: a file is written to each
    drive to measure it, and is gone afterwards.

    \b
    Examples:
      keepstep doctor
      keepstep doctor --volume /nvme0 --volume /nvme1 --state 40Gi --ranks 8
      keepstep doctor --dir /scratch/ckpt --json
    """
    slots = SLOTS_ON_ONE_MACHINE if nodes == 1 else SLOTS
    need = RunRequirements(image_bytes=state, ranks=ranks, slots=slots)
    places = tuple(volume.absolute() for volume in volumes or (directory,))
    found = []
    for finding in _findings(need, places, probe_size):
        found.append(finding)
        if not as_json:
            change = f"\n{'':9}change: {finding.change}" if finding.change else ""
            output.print_lines([f"{finding.outcome!s:<9}{finding.name}: {finding.found}{change}"])
    failed = any(finding.outcome is Outcome.MISSING for finding in found)
    if as_json:
        output.print_json({"ok": not failed, "checks": found})
    if failed:
        raise SystemExit(1)


def _findings(
    need: RunRequirements, volumes: tuple[Path, ...], probe_bytes: int
) -> Iterator[Finding]:
    yield from check_versions()
    yield check_shared_memory(run_dir.SHARED_MEMORY, need)
    yield check_huge_pages(need)
    yield check_memory_lock(need)
    yield check_remove_ipc(Path("/"), os.getuid())
    for volume in volumes:
        yield from check_drive(
            volume,
            need,
            volumes=len(volumes),
            probe_bytes=probe_bytes,
            clock=time.monotonic,
        )
