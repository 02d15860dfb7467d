"""Where the parts of a run live, and the record by which other commands find them again.

    DIR/RUN/service.json   this module's record: volumes, memory directory, options of the service
    DIR/RUN/run.lock       held (flock) by the `keepstep run` that supervises the run
    DIR/RUN/sidecar.log    the sidecar's log, bounded
    VOLUME/RUN/            shards: one root per volume; a volume is DIR unless said otherwise
    /dev/shm/keepstep-UID/HASH/    slots and the socket; HASH is of DIR and RUN

The memory directory is derived, not chosen, so that a command that is started again finds the
slots of its predecessor even when `service.json` is gone.

A directory that was copied or moved is its own: the record says in which directory it was written,
and what it says of another one's volumes and memory is not followed from here.
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

from keepstep.errors import UsageError
from keepstep_sidecar.config.archive import of_plain as archive_of_plain
from keepstep_sidecar.config.peers import of_plain as peers_of_plain

SHARED_MEMORY: Final = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LARGEST_RECORD_BYTES = 1 << 20
_PYTHON_FILE = re.compile(r"\.py[w]?$")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the service of a run was asked for. A service with other options is replaced.

    `keep`, `keep_every`: `last` and `every` of a Retention. `archive`, `peers`: as their `to_plain`
    tells it. `restore_from`: see `config.restore_from.Wish`, like `restore_since`.
    """

    slots: int = 4
    memory_limit_bytes: int | None = None
    stage_every: int = 1
    persist_every: int = 1
    keep: int = 2
    keep_every: str | None = None
    capacity_bytes: int | None = None
    linger_s: float = 900.0
    archive: dict[str, Any] | None = None
    peers: dict[str, Any] | None = None
    restore_from: str = ""
    restore_since: int = 0


@dataclass(frozen=True, kw_only=True)
class Places:
    """Paths of one run. All absolute."""

    run: str
    home: Path
    volumes: tuple[Path, ...]
    memory: Path

    @property
    def socket(self) -> Path:
        return self.memory / "sidecar.sock"

    @property
    def log(self) -> Path:
        return self.home / "sidecar.log"

    @property
    def lock(self) -> Path:
        return self.home / "run.lock"

    @property
    def record(self) -> Path:
        return self.home / "service.json"

    @property
    def roots(self) -> tuple[Path, ...]:
        """Directories that hold shards: one on each volume."""
        return tuple(volume / self.run for volume in self.volumes)


@dataclass(frozen=True, kw_only=True)
class Service:
    """What `service.json` says."""

    places: Places
    options: Options


def run_name(command: Sequence[str]) -> str:
    """The stem of the first *.py in `command`, else the command's own name; made safe as a name.

    Raises UsageError when nothing usable is left.
    """
    script = next((word for word in command if _PYTHON_FILE.search(word)), command[0])
    stem = _PYTHON_FILE.sub("", os.path.basename(script))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:63]
    if not _NAME.fullmatch(name):
        raise UsageError(f"no name for the run in {script!r}; give it one with --run NAME")
    return name


def checked_name(name: str) -> str:
    """`name`, when it can be a directory's name. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-', at most 63"
        )
    return name


def places_of(directory: Path, run: str, volumes: Sequence[Path] = ()) -> Places:
    """Where `run` lives below `directory`; `volumes` default to the directory itself."""
    directory = Path(os.path.abspath(directory))
    return Places(
        run=run,
        home=directory / run,
        volumes=tuple(Path(os.path.abspath(volume)) for volume in volumes) or (directory,),
        memory=SHARED_MEMORY / f"keepstep-{os.getuid()}" / _memory_name(directory, run),
    )


def _memory_name(directory: Path, run: str) -> str:
    return hashlib.sha256(f"{directory}/{run}".encode()).hexdigest()[:12]


def make_memory(places: Places) -> None:
    """Make the memory directory, private to this user. Raises UsageError when it is another's.

    /dev/shm is writable by everybody: a directory that somebody else made there, or a link, is
    refused, as its owner could read the model or exchange it.
    """
    if not SHARED_MEMORY.is_dir():
        raise UsageError(f"{SHARED_MEMORY} is missing: keepstep keeps slots in shared memory")
    for directory in (places.memory.parent, places.memory):
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UsageError(f"{directory} belongs to somebody else; remove it and try again")
        directory.chmod(0o700)


@dataclass(frozen=True, kw_only=True)
class _Home:
    """The directory that a record was written in."""

    path: str
    device: int
    inode: int


@dataclass(frozen=True, kw_only=True)
class _Record:
    """`service.json`. `home`: None in one that an older keepstep wrote."""

    run: str
    volumes: list[str]
    memory: str
    options: dict[str, Any]
    home: _Home | None = None


def save_service(service: Service) -> None:
    """Write `service.json`, whole or not at all."""
    places = service.places
    body = _Record(
        run=places.run,
        volumes=[str(volume) for volume in places.volumes],
        memory=str(places.memory),
        options=dataclasses.asdict(service.options),
        home=_home(places.home),
    )
    temporary = places.record.with_name(f".{places.record.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(body), indent=2) + "\n")
    temporary.replace(places.record)


def _home(path: Path) -> _Home:
    found = path.stat()
    return _Home(path=str(path), device=found.st_dev, inode=found.st_ino)


def load_service(directory: Path, run: str) -> Service:
    """Read what `save_service` wrote; see the module of a directory that was copied or moved.

    Raises UsageError when it is missing, not readable, or leads to another directory's volumes.
    """
    places = places_of(directory, run)
    try:
        record = _read(places.record)
        options = _options(record.options)
    except FileNotFoundError:
        raise UsageError(_unknown_run(directory, run)) from None
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
            UsageError, ValueError) as error:  # fmt: skip
        raise UsageError(
            f"{places.record} cannot be read ({error}); start the run again"
        ) from error
    if record.run != run:
        raise UsageError(
            f"{places.home} holds run {record.run!r}, whose steps go by that name alone; give the"
            " directory that name again, in another DIR if it is a copy"
        )
    return Service(places=_settled(places, record), options=options)


def _read(path: Path) -> _Record:
    """Raises OSError, ValueError, RecursionError."""
    if path.exists() and not path.is_file():
        raise ValueError("not a file")
    with path.open("rb") as file:
        data = file.read(_LARGEST_RECORD_BYTES + 1)
    if len(data) > _LARGEST_RECORD_BYTES:
        raise ValueError(f"more than {_LARGEST_RECORD_BYTES} bytes")
    record = msgspec.convert(json.loads(data), _Record)
    for text in (*record.volumes, record.memory):
        if not text.startswith("/") or "\0" in text:
            raise ValueError(f"{text!r} is not an absolute path")
    return record


def _settled(places: Places, record: _Record) -> Places:
    """`places` with what `record` says of them. Raises UsageError.

    The volume that is the run's own directory goes with it. Other volumes are this directory's when
    it is the one that the record was written in, at the old place or at a new one.
    """
    memory, volumes = Path(record.memory), [Path(text) for text in record.volumes]
    written = _written_in(places, record)
    if written is not None and _same(written, places.home):
        return dataclasses.replace(places, volumes=tuple(volumes), memory=memory)
    here, moved = [], record.home is not None and _is(places.home, record.home)
    for volume in volumes:
        if written is not None and volume.is_relative_to(written.parent):
            here.append(places.home.parent / volume.relative_to(written.parent))
        elif moved:
            here.append(volume)
        else:
            raise UsageError(
                f"{places.home} is a copy of {written or 'another directory'}, whose volume"
                f" {volume} is not touched from here: choose that one with --dir, or start the run"
                " here again with --volume"
            )
    return dataclasses.replace(places, volumes=tuple(here))


def _written_in(places: Places, record: _Record) -> Path | None:
    """The directory of the run when the record was written. An older record tells it by the name
    of the memory directory alone, and only where a volume is that directory."""
    if record.home is not None:
        return Path(record.home.path)
    name = Path(record.memory).name
    candidates = [places.home.parent, *map(Path, record.volumes)]
    found = (one / record.run for one in candidates if _memory_name(one, record.run) == name)
    return next(found, None)


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return one == other or one.samefile(other)
    return False


def _is(path: Path, home: _Home) -> bool:
    found = path.stat()
    return (found.st_dev, found.st_ino) == (home.device, home.inode)


def _options(body: dict[str, Any]) -> Options:
    """Raises ValueError, KeyError, TypeError, AttributeError, UsageError."""
    options = msgspec.convert(body, Options)  # what a newer keepstep added is left out
    archive_of_plain(options.archive)
    peers_of_plain(options.peers)
    return options


def runs_in(directory: Path) -> tuple[str, ...]:
    """Names of the runs that are kept below `directory`, sorted."""
    return tuple(sorted(record.parent.name for record in directory.glob("*/service.json")))


def find_service(directory: Path, run: str | None) -> Service:
    """The run named `run`, or the only one there is. Raises UsageError naming the choices."""
    if run is not None:
        return load_service(directory, checked_name(run))
    names = runs_in(directory)
    if not names:
        raise UsageError(f"no run is kept in {directory}; choose another place with --dir DIR")
    if len(names) > 1:
        raise UsageError(
            f"{directory} keeps {len(names)} runs; choose one with --run: {_list(names)}"
        )
    return load_service(directory, names[0])


def _unknown_run(directory: Path, run: str) -> str:
    names = runs_in(directory)
    there = f"it keeps: {_list(names)}" if names else "no run is kept there; see --dir"
    return f"no run {run!r} in {directory}; {there}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown}, and {len(names) - 10} more"
