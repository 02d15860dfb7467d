"""`keepstep-sidecar prepare DIR...`: makes a run's own directory below a node's hostPath.

It runs as root in an init container that has only CHOWN, DAC_OVERRIDE and FOWNER. Other users made
a part of the path. So no link below the mount is followed, and each directory is opened relative to
the one above it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from keepstep.errors import StorageError

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
