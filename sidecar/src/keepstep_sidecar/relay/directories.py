"""Directories of runs on a node, made before a pod starts and removed after a run is gone.

Both run as root, in a container of their own. Other users made a part of the path. So no link below
the mount is followed, and each directory is opened relative to the one above it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from keepstep.directory import Directory
from keepstep.errors import StorageError, UsageError
from keepstep_sidecar.volume.directories import LOCK, RECORD

USER_ID = 65532
GROUP_ID = 65532
MODE = 0o2770
_PASSAGE_MODE = 0o711
"""Mode of directories on the way: others may pass through them but not list them."""


def prepare(directory: Path, *, uid: int = USER_ID, gid: int = GROUP_ID) -> None:
    """Make `directory` (and its parents) and give it to the sidecar. Idempotent.

    Raises StorageError, also when a part of the path below the mount is a link or not a directory.
    """
    directory = Path(os.path.abspath(directory))
    start = mount_of(directory)
    try:
        fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{directory}: cannot open {start}: {error.strerror}") from error
    try:
        for name in directory.relative_to(start).parts:
            inner = _enter(fd, name, directory)
            os.close(fd)
            fd = inner
        _give(fd, directory, uid=uid, gid=gid)
    finally:
        os.close(fd)


def mount_of(directory: Path) -> Path:
    """The first mount point on the way to `directory` after `/`: others make no links above it.

    The last mount point would not do, because a link could choose it.
    """
    way = (*reversed(directory.parents), directory)
    return next((path for path in way[1:] if os.path.ismount(path)), way[0])


def _enter(parent: int, name: str, directory: Path) -> int:
    """Open `name` in the open directory `parent`; make it if need be."""
    try:
        try:
            os.mkdir(name, _PASSAGE_MODE, dir_fd=parent)
        except FileExistsError:
            made = False
        else:
            made = True
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=parent)
    except OSError as error:
        hint = "; a link is not followed there" if _is_link(parent, name) else ""
        raise StorageError(f"{directory}: {name}: {error.strerror}{hint}") from error
    if made:
        os.fchmod(fd, _PASSAGE_MODE)  # independent of the umask
    return fd


def _is_link(parent: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _give(fd: int, directory: Path, *, uid: int, gid: int) -> None:
    try:
        if not _is_given(fd, uid=uid, gid=gid):
            # Set the set-group-id bit first, while the group is our own. Without CAP_FSETID the
            # kernel drops the bit when the group is another one. On a directory, a change of owner
            # keeps it.
            os.fchown(fd, -1, os.getegid())
            os.fchmod(fd, MODE)
            os.fchown(fd, uid, gid)
    except OSError as error:
        raise StorageError(
            f"{directory}: cannot give it to {uid}:{gid} with mode {MODE:o}: {error.strerror}"
        ) from error
    if not _is_given(fd, uid=uid, gid=gid):
        raise StorageError(f"{directory}: the file system does not keep owner and mode")


def _is_given(fd: int, *, uid: int, gid: int) -> bool:
    found = os.fstat(fd)
    return (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (uid, gid, MODE)


# --- removal ---------------------------------------------------------------------------------


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
