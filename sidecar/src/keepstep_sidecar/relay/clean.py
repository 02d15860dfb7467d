"""`keepstep-sidecar clean DIR...`: removes the directory of a run that is gone,
`<volume>/<ns>/<run>`.

The operator knows whether a run is gone. This module checks three things. No sidecar holds any of
the run's volumes (each sidecar takes a lock). None has written there since the run was gone: the
run may have lived once more while the operator was away. And the directory looks like that of a
run, `<node rank>/<run>/.lock` and nothing beside, because the name of the run comes from a label:
it may be that of a directory in which others keep files.

The directory is first renamed as a whole. So a run of the same name that begins meanwhile gets a
new directory and none of the old files. It runs as root with DAC_OVERRIDE only, so no link is ever
followed and no other file system is entered.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from keepstep.directory import Directory
from keepstep.errors import StorageError, UsageError
from keepstep_sidecar.volume.paths import LOCK, RECORD
from keepstep_sidecar.volume.prepare import mount_of

_CLOCKS_APART_S = 600.0
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NODE_RANK = re.compile(r"[0-9]+")


class StillUsedError(StorageError):
    """The run was alive after it had been taken for gone."""


def clean(directory: Path, *, gone_since: float = math.inf) -> int:
    """Remove `directory`; returns the number of files removed, 0 if it is missing. Idempotent.

    `gone_since`: Unix seconds; a later write is a sign of life. Raises StillUsedError for such a
    write, UsageError when the path is not `<volume>/<namespace>/<run>`, and StorageError when a
    sidecar uses the directory, it does not look like that of a run, or something cannot be removed.
    """
    directory = Path(os.path.abspath(directory))
    _check_name(directory)
    aside = _aside(directory.name)
    try:
        parent = _opened(directory.parent)
        parent.remove(aside)  # of an attempt that was cut short
        with _unused(parent, directory, gone_since + _CLOCKS_APART_S):
            parent.rename(directory.name, aside)
            return parent.remove(aside)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StorageError(f"{directory}: cannot be removed: {error}") from error


def _check_name(directory: Path) -> None:
    mount = mount_of(directory)
    if directory == mount:
        raise UsageError(f"{directory}: a whole volume is no directory of a run")
    names = directory.parts[-2:]
    if directory.parent == mount or not all(map(_DNS_LABEL.fullmatch, names)):
        raise UsageError(f"{directory} is no directory of a run: <volume>/<namespace>/<run>")


def _aside(name: str) -> str:
    """A name that no run has: names of runs are DNS labels."""
    return f".{name}.removed"


def _opened(directory: Path) -> Directory:
    """Open a directory. No link below the mount point is followed."""
    start = mount_of(directory)
    return Directory.opened(start).inside(*directory.relative_to(start).parts)


@contextlib.contextmanager
def _unused(parent: Directory, directory: Path, latest: float) -> Iterator[None]:
    """Hold every lock that a sidecar would hold, `<node rank>/<run>/.lock`. Raises StorageError."""
    with contextlib.ExitStack() as held:
        run = parent.inside(directory.name)
        for rank in run.names():
            place = _place(run, rank)
            if place is None or not _NODE_RANK.fullmatch(rank):
                raise _not_a_run(directory, f"{directory}/{rank} is no node rank's directory")
            for name in place.names():
                inner = _place(place, name)
                if inner is None or name != directory.name:
                    raise _not_a_run(directory, f"{directory}/{rank}/{name} is not this run's")
                if not _locked(held, inner):
                    raise StorageError(
                        f"{directory}/{rank}/{name}: a sidecar uses it, or it has no {LOCK}, so the"
                        " run may not be gone; nothing was removed"
                    )
                if _written(inner) > latest:
                    raise StillUsedError(
                        f"{directory}/{rank}/{name}: was written to after the run was gone;"
                        " nothing was removed"
                    )
        yield


def _not_a_run(directory: Path, why: str) -> StorageError:
    return StorageError(
        f"{directory} is not the directory of one run: {why}; nothing was removed. Look at what"
        " lies there, and remove by hand what nobody needs"
    )


def _written(directory: Directory) -> float:
    """When a step was last begun or removed there, or the record replaced, in Unix seconds."""
    record = directory.lstat(RECORD)
    times = [os.fstat(directory.fd).st_mtime]
    return max(times if record is None else [*times, record.st_mtime])


def _place(parent: Directory, name: str) -> Directory | None:
    """Open a directory in a directory. None for anything else, links included."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return parent.inside(name)
    return None


def _locked(held: contextlib.ExitStack, directory: Directory) -> bool:
    """Take the directory's lock; False if another process has it. A sidecar makes its lock before
    any other file. So a directory that is not empty and has no lock counts as used."""
    try:
        fd = directory.open(LOCK, os.O_RDWR)
    except FileNotFoundError:
        return not directory.names()
    held.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
