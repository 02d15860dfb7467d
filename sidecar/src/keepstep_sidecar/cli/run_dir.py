"""Where the parts of a run are, and the record by which other commands find them.

    DIR/RUN/sidecar.toml   this module's record, which is also the configuration of the sidecar
    DIR/RUN/run.lock       locked (flock) by the command that supervises the run; holds its pid, and
                           the pid of the training command
    DIR/RUN/sidecar.log    the sidecar's log, bounded
    VOLUME/RUN/            shards: one root per volume; the default volume is DIR
    /dev/shm/keepstep-UID/HASH/    slots and the socket; HASH is of DIR and RUN
    /dev/hugepages/keepstep-UID-HASH/    slots, while huge pages are free

The memory directory follows from DIR and RUN, so that a command that is started again finds the
slots of its predecessor even without the record.

A directory may be copied or moved. So the record says in which directory it was written. A copy
uses neither the volumes nor the memory of the original.

A directory that is found may be anybody's: of another user, or unpacked from an archive. So who
writes to DIR/RUN must be its user, and no other may write there; and its record gives data and no
settings: no address, no file that is read or sent, no place of memory is taken from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pwd
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import tomllib

from keepstep import steps
from keepstep.directory import OpenDirectory
from keepstep.errors import UsageError, few
from keepstep_sidecar.config.settings import (
    ADDRESS,
    LARGEST_FILE_BYTES,
    PATH,
    PEM,
    PLACE,
    STEP,
    URL,
    Setting,
    to_toml,
    toml_value,
)
from keepstep_sidecar.config.sidecar import SETTINGS, Config, check_apart, given_values
from keepstep_sidecar.memory.slot_directories import hugetlbfs_mount

SHARED_MEMORY: Final = Path("/dev/shm")
SHARED: Final = "KEEPSTEP_SHARED_DIR"
_RECORD: Final = "sidecar.toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NO_DATA: Final = (ADDRESS, PATH, PEM, PLACE, STEP, URL)
"""Kinds of settings that are never taken from a record."""
_OF_SEVERAL: Final = ("nodes", "node_rank")
"""Nor these: without the leader's address they are of no use."""
_PYTHON_FILE = re.compile(r"\.py[w]?$")


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """A run: `home` is DIR/RUN, `config` the configuration of its sidecar. Paths are absolute.

    A sidecar that runs with another `config` is replaced.
    """

    home: Path
    config: Config

    @classmethod
    def of(cls, directory: Path, run: str, **values: Any) -> RunDir:
        """`run` below `directory`, with these `values` of its Config. Unless `values` name volumes,
        the only volume is `directory`. Raises UsageError."""
        directory = Path(os.path.abspath(directory))
        placed = {"run": check_run_name(run), **_memory(directory, run)}
        config = Config.from_values({"volumes": (directory,), **values, **placed})
        check_apart((directory,), run, config.archive_config)
        return cls(home=directory / run, config=config)

    @property
    def name(self) -> str:
        return self.config.run

    @property
    def memory(self) -> Path:
        return self.config.memory_dir

    @property
    def socket(self) -> Path:
        return self.config.socket

    @property
    def log(self) -> Path:
        return self.home / "sidecar.log"

    @property
    def lock(self) -> Path:
        return self.home / "run.lock"

    @property
    def record(self) -> Path:
        return self.home / _RECORD

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories that hold shards, one on each volume."""
        return tuple(volume / self.name for volume in self.config.volumes)


def derive_name_from_command(command: Sequence[str]) -> str:
    """The stem of the first *.py in `command`, or else of the program, as a safe name.

    Raises UsageError if no usable name is left.
    """
    script = next((word for word in command if _PYTHON_FILE.search(word)), command[0])
    stem = _PYTHON_FILE.sub("", os.path.basename(script))
    name = steps.sanitize_run_name(stem)
    if not _NAME.fullmatch(name):
        raise UsageError(f"no name for the run in {script!r}; give it one with --run NAME")
    return name


def check_run_name(name: str) -> str:
    """Returns `name`. Raises UsageError if it cannot name a run."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-', at most 63"
        )
    return name


def memory_directory(directory: Path, run: str) -> Path:
    """The memory directory of `run`, which holds slots and socket."""
    name = hashlib.sha256(f"{os.path.abspath(directory)}/{run}".encode(errors="surrogateescape"))
    return SHARED_MEMORY / f"keepstep-{os.getuid()}" / name.hexdigest()[:12]


def _memory(directory: Path, run: str) -> dict[str, Path | None]:
    """The directories of the run's memory on small and on huge pages, by field of a Config."""
    small, mount = memory_directory(directory, run), hugetlbfs_mount()
    huge = None if mount is None else mount / f"{small.parent.name}-{small.name}"
    return {"memory_dir": small, "huge_pages_dir": huge}


def make_memory(memory: Path) -> None:
    """Make the memory directory, private to this user. Raises UsageError if another user owns it,
    and names that user, and where it cannot be made.

    Every user can write to /dev/shm. A link, or a directory that another user made, is refused:
    its owner could read or replace the model.
    """
    if not SHARED_MEMORY.is_dir():
        raise UsageError(f"{SHARED_MEMORY} is missing: keepstep keeps slots in shared memory")
    for directory in (memory.parent, memory):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise UsageError(
                f"no slots can be kept in shared memory ({_reason(error)}): mount a tmpfs on"
                f" {SHARED_MEMORY} that user {find_user_name(os.geteuid())} may write to"
            ) from error
        found = directory.lstat()
        what = "directory" if stat.S_ISDIR(found.st_mode) else "file or link"
        if what != "directory" or found.st_uid != os.getuid():
            raise UsageError(
                f"{directory} is a {what} of user {find_user_name(found.st_uid)}, and slots go"
                " there: that user or root has to remove it"
            )
        directory.chmod(0o700)


def create_run_directory(kept: RunDir) -> None:
    """Make the run's directory. Raises UsageError."""
    directory = kept.home.parent
    try:
        check_own(OpenDirectory.open_path(kept.home, make=True))
        if directory.name == ".keepstep":  # in the user's project: git must not commit gigabytes
            _ignore(OpenDirectory.open_path(Path(os.path.realpath(directory))))
    except OSError as error:
        raise UsageError(
            f"cannot keep a run in {directory} ({_reason(error)}); choose --dir DIR"
        ) from error
    for root in kept.roots:
        with contextlib.suppress(OSError):  # the sidecar makes it, or says what is wrong with it
            check_own(OpenDirectory.open_path(root))


def _ignore(directory: OpenDirectory) -> None:
    with contextlib.suppress(FileExistsError):
        fd = directory.open_file(".gitignore", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with open(fd, "w") as file:
            file.write("*\n")


def check_own(directory: OpenDirectory) -> None:
    """Raises UsageError unless the directory is of this user, and no other may write to it."""
    found, path = os.fstat(directory.fd), directory.path
    if os.environ.get(SHARED):
        return
    trust = f"choose another --dir, or set {SHARED}=1 if you trust them with your steps"
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"{path} belongs to user {find_user_name(found.st_uid)}: run this command as that user,"
            f" {trust}"
        )
    if found.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"all users of this machine may write to {path}: say `chmod o-w {path}`, {trust}"
        )


def find_user_name(uid: int) -> str:
    """The user's name, or the number if it has none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


# --- the record ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Home:
    """The directory in which a record was written."""

    path: str
    device: int
    inode: int


def save_record(kept: RunDir) -> None:
    """Write the record atomically. Raises OSError, UsageError."""
    home = OpenDirectory.open_path(kept.home)
    home.write(_RECORD, _text(kept, home), 0o644)


def is_record_current(kept: RunDir) -> bool:
    """Whether `save_record` would write what stands there."""
    try:
        home = OpenDirectory.open_path(kept.home)
        return home.read(_RECORD, most_bytes=LARGEST_FILE_BYTES) == _text(kept, home)
    except (OSError, UsageError):
        return False


def _is_data(setting: Setting) -> bool:
    return setting.for_run and setting.kind not in _NO_DATA and setting.name not in _OF_SEVERAL


def _text(kept: RunDir, home: OpenDirectory) -> bytes:
    found = os.fstat(home.fd)
    text = (
        "# Written by `keepstep run`, for its sidecar and for the other commands.\n"
        + to_toml(SETTINGS, kept.config)
        + f"\n[home]\npath = {toml_value(kept.home)}\n"
        + f"device = {found.st_dev}\ninode = {found.st_ino}\n"
    )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"a path that is not UTF-8 cannot be kept in {kept.record}") from error


def load_record(directory: Path, run: str) -> RunDir:
    """Read what `save_record` wrote, without settings: see the module, also for what holds of a
    directory that was copied or moved.

    Raises UsageError if the record is missing or unreadable, is of a run of another name, or leads
    to the volumes of another directory.
    """
    home = Path(os.path.abspath(directory)) / run
    try:
        data = OpenDirectory.open_path(home).read(_RECORD, most_bytes=LARGEST_FILE_BYTES)
        written = tomllib.loads(data.decode())
        origin = msgspec.convert(written.pop("home"), _Home)
        values = {
            setting.field: setting.validate_value(
                written[setting.name], where=f"{home / _RECORD}: {setting.name}"
            )
            for setting in SETTINGS
            if setting.name in written and _is_data(setting)
        }
        config = Config.from_values({**values, **_memory(_began_in(home, origin), run)})
    except FileNotFoundError:
        raise UsageError(_unknown_run(directory, run)) from None
    except UsageError as error:
        raise UsageError(f"{error}; start the run again") from error
    except (OSError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"the record in {home} cannot be read ({error}); start the run again"
        ) from error
    if config.run != run:
        raise UsageError(
            f"{home} holds run {config.run!r}, whose steps carry that name: rename the"
            " directory back; move a copy of it to another DIR"
        )
    volumes = tuple(_settled(volume, home, origin) for volume in config.volumes)
    return RunDir(home=home, config=dataclasses.replace(config, volumes=volumes))


def _began_in(home: Path, origin: _Home) -> Path:
    """DIR as the run was started with it, from which the place of its memory follows; links lead
    to it by other names."""
    written = Path(origin.path)
    with contextlib.suppress(OSError, ValueError):
        if written.name == home.name and written.samefile(home):
            return written.parent
    return home.parent


def _settled(volume: Path, home: Path, origin: _Home) -> Path:
    """Where the volume is now. Raises UsageError.

    A volume below the directory that held the run's is found below the directory that holds it now.
    Another one applies only if `home` is the directory in which the record was written, at its old
    path or moved to a new one.
    """
    found, written = home.stat(), Path(origin.path)
    here, below = origin.path == str(home), volume.is_relative_to(written.parent)
    same = found.st_ino == origin.inode and (here or found.st_dev == origin.device)
    if same and (here or not below):
        return volume
    if not below:
        raise UsageError(
            f"{home} is a copy of {written}, whose volume {volume} is not touched from here: choose"
            " that one with --dir, or start the run here again with --volume"
        )
    inside = volume.relative_to(written.parent)
    if Path(os.path.realpath(home.parent / inside)) != Path(os.path.realpath(home.parent)) / inside:
        raise UsageError(f"{home.parent / inside} is a link; start the run again with --volume")
    return home.parent / inside


# --- finding runs ----------------------------------------------------------------------------


def runs_in(directory: Path) -> tuple[str, ...]:
    """The names of the runs below `directory`, sorted."""
    return tuple(sorted(record.parent.name for record in directory.glob(f"*/{_RECORD}")))


def find_runs_without_record(directory: Path, run: str | None) -> tuple[RunDir, ...]:
    """Runs below `directory` (only `run`, if it is named) that have memory but no record."""
    found = []
    for file in (SHARED_MEMORY / f"keepstep-{os.getuid()}").glob("*/sidecar.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, UsageError):
            name = json.loads(file.read_bytes()[:LARGEST_FILE_BYTES])["config"]["run"]
            kept = RunDir.of(directory, name)
            if kept.memory == file.parent and run in (None, name) and not kept.record.exists():
                found.append(kept)
    return tuple(found)


def find_run(directory: Path, run: str | None) -> RunDir:
    """The run named `run`, or the only run of `directory`. Raises UsageError that names the
    choices."""
    if run is not None:
        return load_record(directory, check_run_name(run))
    names = runs_in(directory)
    if not names:
        raise UsageError(f"no run is kept in {directory}; choose another place with --dir DIR")
    if len(names) > 1:
        raise UsageError(
            f"{directory} keeps {len(names)} runs; choose one with --run: {few(names, 10)}"
        )
    return load_record(directory, names[0])


def find_run_to_read(directory: Path, run: str | None) -> RunDir:
    """As `find_run`, for commands that change nothing: in the container of a pod's sidecar, which
    has no record, they show the pod's run. Raises UsageError."""
    pod = None if runs_in(directory) else _of_pod()
    return pod if pod is not None and run in (None, pod.name) else find_run(directory, run)


def _of_pod() -> RunDir | None:
    """The run of this container's sidecar, which is configured by the environment alone; None
    elsewhere. Raises UsageError."""
    values = given_values()
    if not values.keys() >= {"run", "memory_dir", "volumes"}:
        return None
    config = Config.from_values(values)
    return RunDir(home=config.volumes[0] / config.run, config=config)


def _unknown_run(directory: Path, run: str) -> str:
    names = runs_in(directory)
    there = f"it keeps: {few(names, 10)}" if names else "no run is kept there; see --dir"
    return f"no run {run!r} in {directory}; {there}"
