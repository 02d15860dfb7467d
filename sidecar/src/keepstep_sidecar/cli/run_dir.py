"""Where the parts of a run are, and the record by which other commands find them.

    DIR/RUN/sidecar.toml   this module's record, which is also the configuration of the sidecar
    DIR/RUN/service.json   the record of an older keepstep: read, and replaced at the next start
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
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from keepstep.errors import UsageError, few
from keepstep_sidecar.config.keys import (
    LARGEST_FILE_BYTES,
    gathered,
    read_file,
    to_toml,
    toml_value,
)
from keepstep_sidecar.config.sidecar import KEYS, Config
from keepstep_sidecar.memory.slot_directories import usual_mount

SHARED_MEMORY: Final = Path("/dev/shm")
_RECORD, _OLDER_RECORD = "sidecar.toml", "service.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
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
        placed = {"run": run, **_memory(directory, run)}
        config = Config.of({"volumes": (directory,), **values, **placed})
        return cls(home=directory / run, config=config)

    @property
    def run(self) -> str:
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
        return tuple(volume / self.run for volume in self.config.volumes)


def run_name(command: Sequence[str]) -> str:
    """The stem of the first *.py in `command`, or else of the program, as a safe name.

    Raises UsageError if no usable name is left.
    """
    script = next((word for word in command if _PYTHON_FILE.search(word)), command[0])
    stem = _PYTHON_FILE.sub("", os.path.basename(script))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:63]
    if not _NAME.fullmatch(name):
        raise UsageError(f"no name for the run in {script!r}; give it one with --run NAME")
    return name


def checked_name(name: str) -> str:
    """Returns `name`. Raises UsageError if it cannot name a run."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-', at most 63"
        )
    return name


def memory_of(directory: Path, run: str) -> Path:
    """The memory directory of `run`, which holds slots and socket."""
    name = hashlib.sha256(f"{os.path.abspath(directory)}/{run}".encode(errors="surrogateescape"))
    return SHARED_MEMORY / f"keepstep-{os.getuid()}" / name.hexdigest()[:12]


def _memory(directory: Path, run: str) -> dict[str, Path | None]:
    """The directories of the run's memory on small and on huge pages, by field of a Config."""
    small, mount = memory_of(directory, run), usual_mount()
    huge = None if mount is None else mount / f"{small.parent.name}-{small.name}"
    return {"memory_dir": small, "huge_pages_dir": huge}


def make_memory(memory: Path) -> None:
    """Make the memory directory, private to this user. Raises UsageError if another user owns it.

    Every user can write to /dev/shm. A link, or a directory that another user made, is refused:
    its owner could read or replace the model.
    """
    if not SHARED_MEMORY.is_dir():
        raise UsageError(f"{SHARED_MEMORY} is missing: keepstep keeps slots in shared memory")
    for directory in (memory.parent, memory):
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UsageError(f"{directory} belongs to somebody else; remove it and try again")
        directory.chmod(0o700)


def make_home(kept: RunDir) -> None:
    """Make the run's directory. Raises UsageError."""
    directory = kept.home.parent
    try:
        kept.home.mkdir(parents=True, exist_ok=True)
        if (
            directory.name == ".keepstep"
        ):  # it is in the user's project: git must not commit its gigabytes
            (directory / ".gitignore").write_text("*\n")
    except OSError as error:
        raise UsageError(
            f"cannot keep a run in {directory} ({error.strerror}); choose --dir DIR"
        ) from error


# --- the record ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Home:
    """The directory in which a record was written."""

    path: str
    device: int
    inode: int


def save(kept: RunDir) -> None:
    """Write the record atomically. Raises OSError, UsageError."""
    found = kept.home.stat()
    text = (
        "# Written by `keepstep run`, for its sidecar and for the other commands.\n"
        + to_toml(KEYS, kept.config)
        + f"\n[home]\npath = {toml_value(kept.home)}\n"
        + f"device = {found.st_dev}\ninode = {found.st_ino}\n"
    )
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"a path that is not UTF-8 cannot be kept in {kept.record}") from error
    temporary = kept.record.with_name(f".{_RECORD}.tmp-{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(kept.record)
    (kept.home / _OLDER_RECORD).unlink(missing_ok=True)


def load(directory: Path, run: str) -> RunDir:
    """Read what `save` wrote. The module says what holds for a copied or moved directory.

    Raises UsageError if the record is missing or unreadable, is of a run of another name, or leads
    to the volumes of another directory.
    """
    home = Path(os.path.abspath(directory)) / run
    try:
        written, file = _read(home)
        noted = written.pop("home", None)
        origin = None if noted is None else msgspec.convert(noted, _Home)
        values = gathered(KEYS, flags={}, environment={}, written=written, file=file)
        config = Config.of(values)
    except FileNotFoundError:
        raise UsageError(_unknown_run(directory, run)) from None
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, UsageError,
            ValueError) as error:  # fmt: skip
        raise UsageError(
            f"the record in {home} cannot be read ({error}); start the run again"
        ) from error
    if config.run != run:
        raise UsageError(
            f"{home} holds run {config.run!r}, whose steps go by that name alone; give the"
            " directory that name again, in another DIR if it is a copy"
        )
    return RunDir(home=home, config=_settled(home, config, origin))


def _read(home: Path) -> tuple[dict[str, Any], Path]:
    """The values of the record, by key, and its file. Raises FileNotFoundError and UsageError, and
    for a malformed older record any error of its conversion."""
    with contextlib.suppress(FileNotFoundError):
        return read_file(home / _RECORD), home / _RECORD
    file = home / _OLDER_RECORD
    if file.exists() and not file.is_file():
        raise ValueError("not a file")
    with file.open("rb") as opened:
        data = opened.read(LARGEST_FILE_BYTES + 1)
    if len(data) > LARGEST_FILE_BYTES:
        raise ValueError(f"more than {LARGEST_FILE_BYTES} bytes")
    try:
        return _of_older(json.loads(data)), file
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _of_older(body: Any) -> dict[str, Any]:
    """The values of `service.json`, by today's keys."""
    options = dict(body["options"])
    archive, peers = options.pop("archive", None) or {}, options.pop("peers", None) or {}
    kept, files = archive.pop("retention", None) or {}, peers.pop("files", None) or {}
    seconds = kept.get("every_s")
    return {
        **{key.name: options.get(key.field, options.get(key.name)) for key in KEYS},
        "run": body["run"],
        "volumes": body["volumes"],
        "memory_dir": body["memory"],
        **{f"archive_{name}": value for name, value in archive.items()},
        "archive": archive.get("url"),
        "archive_keep": kept.get("last"),
        "archive_keep_every": kept.get("every_steps") if seconds is None else f"{seconds}s",
        **{f"peer_{name}": value for name, value in peers.items()},
        "peers": peers.get("peers"),
        "peer_cert": files.get("certificate"),
        "peer_key": files.get("key"),
        "peer_ca": files.get("authorities"),
        "home": body.get("home"),
    }


def _settled(home: Path, config: Config, origin: _Home | None) -> Config:
    """`config` as it applies to this `home`. Raises UsageError.

    Volumes below the directory that held the run's are found below the directory that holds it now.
    Other volumes apply only if `home` is the directory in which the record was written, at its old
    path or moved to a new one.
    """
    written = _written_in(home, config, origin)
    if written is not None and _same(written, home):
        return config
    here, moved = [], origin is not None and _is(home, origin)
    for volume in config.volumes:
        if written is not None and volume.is_relative_to(written.parent):
            here.append(home.parent / volume.relative_to(written.parent))
        elif moved:
            here.append(volume)
        else:
            raise UsageError(
                f"{home} is a copy of {written or 'another directory'}, whose volume"
                f" {volume} is not touched from here: choose that one with --dir, or start the run"
                " here again with --volume"
            )
    memory: dict[str, Any] = _memory(home.parent, config.run)
    return dataclasses.replace(config, volumes=tuple(here), **memory)


def _written_in(home: Path, config: Config, origin: _Home | None) -> Path | None:
    """The path of `home` when the record was written; None if unknown. The oldest records do not
    state it. Then it is known only if a candidate gives the recorded name of the memory directory:
    the parent of `home`, or a volume."""
    if origin is not None:
        return Path(origin.path)
    name = config.memory_dir.name
    candidates = (home.parent, *config.volumes)
    found = (one / config.run for one in candidates if memory_of(one, config.run).name == name)
    return next(found, None)


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return one == other or one.samefile(other)
    return False


def _is(path: Path, home: _Home) -> bool:
    found = path.stat()
    return (found.st_dev, found.st_ino) == (home.device, home.inode)


# --- finding runs ----------------------------------------------------------------------------


def runs_in(directory: Path) -> tuple[str, ...]:
    """The names of the runs below `directory`, sorted."""
    records = (*directory.glob(f"*/{_RECORD}"), *directory.glob(f"*/{_OLDER_RECORD}"))
    return tuple(sorted({record.parent.name for record in records}))


def removed_runs(directory: Path, run: str | None) -> tuple[RunDir, ...]:
    """Runs below `directory` (only `run`, if it is named) that have memory but no record."""
    found = []
    for file in (SHARED_MEMORY / f"keepstep-{os.getuid()}").glob("*/sidecar.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, UsageError):
            name = checked_name(json.loads(file.read_bytes()[:LARGEST_FILE_BYTES])["config"]["run"])
            kept = RunDir.of(directory, name)
            if kept.memory == file.parent and run in (None, name) and not kept.record.exists():
                found.append(kept)
    return tuple(found)


def find(directory: Path, run: str | None) -> RunDir:
    """The run named `run`, or the only run of `directory`. Raises UsageError that names the
    choices."""
    if run is not None:
        return load(directory, checked_name(run))
    names = runs_in(directory)
    if not names:
        raise UsageError(f"no run is kept in {directory}; choose another place with --dir DIR")
    if len(names) > 1:
        raise UsageError(
            f"{directory} keeps {len(names)} runs; choose one with --run: {few(names, 10)}"
        )
    return load(directory, names[0])


def _unknown_run(directory: Path, run: str) -> str:
    names = runs_in(directory)
    there = f"it keeps: {few(names, 10)}" if names else "no run is kept there; see --dir"
    return f"no run {run!r} in {directory}; {there}"
