"""`keepstep-sidecar clean DIR...`: removes the directory of a run that is gone,
`<volume>/<ns>/<run>`.

The operator knows whether a run is gone. This module checks three things. No sidecar holds any of
the run's volumes (each sidecar takes a lock). None has written there since the run was gone: the
run may have lived once more while the operator was away. And the directory looks like that of a
run, `<node rank>/<run>/.lock`, because the name of the run comes from a label.

The directory is first renamed as a whole. So a run of the same name that begins meanwhile gets a
new directory and none of the old files. It runs as root with DAC_OVERRIDE only, so no link is ever
followed and no other file system is entered.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from keepstep.errors import StorageError, UsageError
from keepstep_sidecar.volume.paths import LOCK, RECORD
from keepstep_sidecar.volume.prepare import mount_of

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCKED = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

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
    try:
        with _opened(directory.parent) as parent:
            _drop(parent, _aside(directory.name))  # of an attempt that was cut short
            with _unused(parent, directory, gone_since + _CLOCKS_APART_S):
                os.rename(
                    directory.name, _aside(directory.name), src_dir_fd=parent, dst_dir_fd=parent
                )
                return _drop(parent, _aside(directory.name))
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


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Open a directory. No link below the mount point is followed."""
    start = mount_of(directory)
    fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in directory.relative_to(start).parts:
            inner = os.open(name, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _unused(parent: int, directory: Path, latest: float) -> Iterator[None]:
    """Hold every lock that a sidecar would hold, `<node rank>/<run>/.lock`. Raises StorageError."""
    with contextlib.ExitStack() as held:
        run = _entered(held, parent, directory.name)
        for rank in os.listdir(run):
            place = _place(held, run, rank)
            if place is None:
                continue
            if not _NODE_RANK.fullmatch(rank):
                raise _not_a_run(directory, f"{directory}/{rank} is no node rank's directory")
            for name in os.listdir(place):
                inner = _place(held, place, name)
                if inner is None:
                    continue
                if name != directory.name:
                    raise _not_a_run(directory, f"{directory}/{rank}/{name} is of another run")
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


def _written(directory: int) -> float:
    """When a step was last begun or removed there, or the record replaced, in Unix seconds."""
    times = [os.fstat(directory).st_mtime]
    with contextlib.suppress(FileNotFoundError):
        times.append(_lstat(directory, RECORD).st_mtime)
    return max(times)


def _entered(held: contextlib.ExitStack, parent: int, name: str) -> int:
    fd = os.open(name, _DIRECTORY, dir_fd=parent)
    held.callback(os.close, fd)
    return fd


def _place(held: contextlib.ExitStack, parent: int | None, name: str) -> int | None:
    """Open a directory in a directory. None for anything else, links included."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if parent is not None and stat.S_ISDIR(_lstat(parent, name).st_mode):
            return _entered(held, parent, name)
    return None


def _locked(held: contextlib.ExitStack, directory: int) -> bool:
    """Take the directory's lock; False if another process has it. A sidecar makes its lock before
    any other file. So a directory that is not empty and has no lock counts as used."""
    try:
        fd = os.open(LOCK, _LOCKED, dir_fd=directory)
    except FileNotFoundError:
        return not os.listdir(directory)
    held.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _drop(parent: int, name: str) -> int:
    """Remove a tree below an open directory. Returns how many files were removed."""
    try:
        found = _lstat(parent, name)
    except FileNotFoundError:
        return 0
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(name, dir_fd=parent)
        return 1
    top = _inside(parent, name)
    try:
        gone = _empty(top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)
    return gone


def _inside(parent: int, name: str) -> int:
    """Open a directory of the same file system. Raises StorageError for another file system."""
    if _lstat(parent, name).st_dev != os.fstat(parent).st_dev:
        raise StorageError(f"{name} is another file system, mounted there; it is left alone")
    return os.open(name, _DIRECTORY, dir_fd=parent)


def _empty(top: int) -> int:
    """Remove what is in an open directory. Directories further down are first moved up into it. So
    neither the stack nor the number of descriptors grows with the depth of the tree, which anyone
    may have made."""
    gone, found = 0, os.listdir(top)
    names = set(found)
    while found:
        name = found.pop()
        if not stat.S_ISDIR(_lstat(top, name).st_mode):
            os.unlink(name, dir_fd=top)
            gone += 1
            continue
        inner = _inside(top, name)
        try:
            for one in os.listdir(inner):
                if stat.S_ISDIR(_lstat(inner, one).st_mode):
                    os.close(_inside(inner, one))
                    free = next(new for n in itertools.count() if (new := str(n)) not in names)
                    os.rename(one, free, src_dir_fd=inner, dst_dir_fd=top)
                    names.add(free)
                    found.append(free)
                else:
                    os.unlink(one, dir_fd=inner)
                    gone += 1
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)
        names.discard(name)
    return gone


def _lstat(parent: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=parent, follow_symlinks=False)
