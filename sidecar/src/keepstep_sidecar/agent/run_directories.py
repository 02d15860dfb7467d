"""Directories of runs on a node: made before a pod starts, and found again.

    <hostPath>/[...]/<namespace>/<run>/<node rank>/<run>
    <hostPath>/[...]/<namespace>/<run>/<node rank>/.compile-cache/<user>   of trainers

Of the first line, the last two are the sidecar's; those above belong to root, and the sidecar's
group may list them. Other users made a part of the path. So no link below the mount is followed,
and each directory is opened relative to the one above it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from keepstep import compile_cache
from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError
from keepstep_sidecar.log import warn

USER_ID = 65532
GROUP_ID = 65532
MODE = 0o2770
_PASSAGE_MODE = 0o750
"""Mode of directories on the way: the group may pass through them and list them."""


def prepare_directory(directory: Path, *, uid: int = USER_ID, gid: int = GROUP_ID) -> None:
    """Make `directory` (and its parents) and give it to the sidecar. Idempotent.

    Raises StorageError, also when a part of the path below the mount is a link or not a directory.
    """
    directory = Path(os.path.abspath(directory))
    start = find_outermost_mount(directory)
    while not _prepared(start, directory, uid=uid, gid=gid):
        pass


def prepare_cache(directory: Path, *, limit_bytes: int) -> None:
    """As `prepare_directory`, for the compile caches of a pod's trainers. A user's caches of more
    than `limit_bytes` are removed. Raises StorageError."""
    prepare_directory(directory)
    try:
        place = OpenDirectory.open_path(directory)
        for name in _directories(place):
            compile_cache.clear_if_over_limit(place, name, limit_bytes=limit_bytes)
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror}") from error


def find_outermost_mount(directory: Path) -> Path:
    """The first mount point on the way to `directory` after `/`: others make no links above it.

    The last mount point would not do, because a link could choose it.
    """
    way = (*reversed(directory.parents), directory)
    return next((path for path in way[1:] if os.path.ismount(path)), way[0])


def _prepared(start: Path, directory: Path, *, uid: int, gid: int) -> bool:
    """False if cleaning has set the directory above aside meanwhile: it must be made again.

    The lock of that directory makes it certain that cleaning either sees this pod's sign of life,
    or has set the directory aside before it.
    """
    try:
        above = found = OpenDirectory.open_path(start)
    except OSError as error:
        raise StorageError(f"{directory}: cannot open {start}: {error.strerror}") from error
    names = directory.relative_to(start).parts
    for number, name in enumerate(names, 1):
        if number == len(names) > 1:
            with contextlib.suppress(OSError):  # without locks there, cleaning removes nothing
                fcntl.flock(found.fd, fcntl.LOCK_SH)  # as long as `above` is open
            if not _is_there(above, found):
                return False
        above, found = found, _enter(found, name, directory, gid=gid)
    _give(found.fd, directory, uid=uid, gid=gid)
    with contextlib.suppress(OSError):  # a drive that takes no writes is not cleaned, either
        os.utime(found.fd)
    return True


def _is_there(parent: OpenDirectory, directory: OpenDirectory) -> bool:
    found = parent.lstat(directory.path.name)
    return found is not None and os.path.samestat(found, os.fstat(directory.fd))


def _enter(parent: OpenDirectory, name: str, directory: Path, *, gid: int) -> OpenDirectory:
    """Open `name` in the open directory `parent`; make it if need be."""
    try:
        made = parent.make(name, _PASSAGE_MODE)
        found = parent.open_subdirectory(name)
        if made:
            os.fchown(found.fd, -1, gid)
            os.fchmod(found.fd, _PASSAGE_MODE)  # independent of the umask
    except OSError as error:
        hint = "; a link is not followed there" if _is_link(parent, name) else ""
        raise StorageError(f"{directory}: {name}: {error.strerror}{hint}") from error
    return found


def _is_link(parent: OpenDirectory, name: str) -> bool:
    found = parent.lstat(name)
    return found is not None and stat.S_ISLNK(found.st_mode)


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


# --- finding ---------------------------------------------------------------------------------


DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
NODE_RANK: Final = re.compile(r"[0-9]+")
_DEEPEST: Final = 5
"""How far below a hostPath prefix the directory of a namespace may lie: in one of the policy's own,
which has four names more than the prefix."""
_MOST: Final = 20_000
"""How many directories are looked into, if others keep theirs below the same prefix."""


def find_namespaces(tops: Sequence[Path]) -> Iterator[tuple[OpenDirectory, list[str]]]:
    """All directories below `tops` down to those of namespaces, with the names of the runs whose
    directories lie in each."""
    for top in tops:
        with contextlib.suppress(OSError):  # not there (yet)
            yield from _places(OpenDirectory.open_path(top))


def _places(root: OpenDirectory) -> Iterator[tuple[OpenDirectory, list[str]]]:
    waiting: deque[tuple[str, ...]] = deque([()])
    for _ in range(_MOST):
        if not waiting:
            return
        way = waiting.popleft()
        try:
            place = root.open_subdirectory(*way)
            inner = list(_directories(place))
            runs = [name for name in inner if way and _is_run(place, name)]
        except OSError:  # removed meanwhile, or not ours to read
            continue
        yield place, runs
        if len(way) < _DEEPEST:
            waiting.extend((*way, name) for name in inner if name not in runs)
    warn("directory.scan_truncated", path=str(root.path), most_directories=_MOST)


def _directories(place: OpenDirectory) -> Iterator[str]:
    with os.scandir(place.fd) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield entry.name


def _is_run(namespace: OpenDirectory, name: str) -> bool:
    """Whether a pod's directory lies there: a node rank's, which `prepare_directory` gave to the
    sidecar, or with the sidecar's own of the same name."""
    if not all(map(DNS_LABEL.fullmatch, (namespace.path.name, name))):
        return False
    run = namespace.open_subdirectory(name)
    ranks = [
        run.open_subdirectory(directory)
        for directory in _directories(run)
        if NODE_RANK.fullmatch(directory)
    ]
    return any(os.fstat(rank.fd).st_uid == USER_ID or name in rank.names() for rank in ranks)


def list_sidecar_directories(run: OpenDirectory) -> Iterator[OpenDirectory]:
    """The directories of a run's sidecars, one for each node rank that was here."""
    for rank in filter(NODE_RANK.fullmatch, run.names()):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield run.open_subdirectory(rank, run.path.name)
