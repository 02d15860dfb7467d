"""Where the parts of a run live, and the record by which other commands find them again.

    DIR/RUN/service.json   this module's record: volumes, memory directory, options of the service
    DIR/RUN/run.lock       held (flock) by the `keepstep run` that supervises the run
    DIR/RUN/sidecar.log    the sidecar's log, bounded
    VOLUME/RUN/            shards: one root per volume; a volume is DIR unless said otherwise
    /dev/shm/keepstep-UID/HASH/    slots and the socket; HASH is of DIR and RUN

The memory directory is derived, not chosen, so that a command that is started again finds the
slots of its predecessor even when `service.json` is gone.
"""

from __future__ import annotations

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

from keepstep.errors import UsageError

SHARED_MEMORY: Final = Path("/dev/shm")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
_PYTHON_FILE = re.compile(r"\.py[w]?$")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the service of a run was asked for. A service with other options is replaced.

    `keep`, `keep_every`: `last` and `every` of a Retention. `archive`, `peers`: as their `to_plain`
    tells it. `restore_from`: see `rollback.Wish`, like `restore_since`.
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
    if not _NAME.match(name):
        raise UsageError(f"no name for the run in {script!r}; give it one with --run NAME")
    return name


def checked_name(name: str) -> str:
    """`name`, when it can be a directory's name. Raises UsageError."""
    if not _NAME.match(name):
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


def save_service(service: Service) -> None:
    """Write `service.json`, whole or not at all."""
    places = service.places
    body = {
        "run": places.run,
        "volumes": [str(volume) for volume in places.volumes],
        "memory": str(places.memory),
        "options": dataclasses.asdict(service.options),
    }
    temporary = places.record.with_name(f".{places.record.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(body, indent=2) + "\n")
    temporary.replace(places.record)


def load_service(directory: Path, run: str) -> Service:
    """Read what `save_service` wrote. Raises UsageError when it is missing or not readable."""
    places = places_of(directory, run)
    try:
        body = json.loads(places.record.read_text())
        return Service(
            places=dataclasses.replace(
                places,
                volumes=tuple(Path(volume) for volume in body["volumes"]),
                memory=Path(body["memory"]),
            ),
            options=_options(body["options"]),
        )
    except FileNotFoundError:
        raise UsageError(_unknown_run(directory, run)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{places.record} cannot be read ({error}); start the run again"
        ) from error


def _options(body: dict[str, Any]) -> Options:
    known = {field.name for field in dataclasses.fields(Options)}
    return Options(**{name: value for name, value in body.items() if name in known})


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
