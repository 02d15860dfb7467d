"""The compile caches of a run: what its last life compiled, the next one need not.

    DIR/RUN/compile-cache/made           empty, made with the directory and never changed
    DIR/RUN/compile-cache/<of `made`>/   the caches; the name is the inode and the time of change of
                                         `made`, which nobody chooses: a directory that was
                                         unpacked, cloned or copied has another `made`, so its
                                         caches are never used, and are removed

Each start of a command executes what lies there. So every directory on the way must be one in which
no other user may write; for steps, which are data, less is asked. It is looked at only while the
run has no trainer.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from keepstep import compile_cache
from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError
from keepstep_sidecar.cli.run_dir import RunDir

_NAME: Final = "compile-cache"
_MADE: Final = "made"
_OF_MADE: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")


def cache_variables(
    kept: RunDir, environment: Mapping[str, str], *, limit_bytes: int
) -> dict[str, str]:
    """The variables by which the command keeps its caches in the run's directory; {} if the user
    chose another place. Caches of more than `limit_bytes` are removed first; 0: none are kept.

    Raises OSError, and StorageError that says why none can be kept.
    """
    home = OpenDirectory.open_path(kept.home)
    if compile_cache.has_chosen_cache(environment):
        return {}
    if limit_bytes == 0:
        remove_caches(kept)
        return {}
    _require_private(Path(os.path.realpath(kept.home)))
    place, name = _place(home)
    for entry in filter(_OF_MADE.fullmatch, place.names()):
        if entry == name:
            compile_cache.clear_if_over_limit(place, name, limit_bytes=limit_bytes)
        else:
            place.remove(entry)
    return compile_cache.cache_variables(place, name)


def remove_caches(kept: RunDir) -> None:
    """Remove the caches of a run that holds no step any more. Raises StorageError."""
    try:
        OpenDirectory.open_path(kept.home).remove(_NAME)
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror}; remove it by hand") from error


def _place(home: OpenDirectory) -> tuple[OpenDirectory, str]:
    """The directory of the caches, and a name in it that is unique to this machine's copy."""
    home.make(_NAME, 0o700)
    place = home.open_subdirectory(_NAME)
    fd = place.open_file(_MADE, os.O_RDONLY | os.O_CREAT, 0o600)
    try:
        made = os.fstat(fd)
    finally:
        os.close(fd)
    return place, f"{made.st_ino:x}-{made.st_ctime_ns:x}"


def _require_private(path: Path) -> None:
    """Raises StorageError if another user may replace `path`: write to it or above it. A directory
    like /tmp, where each removes only what is his, is none of these; nor is a group that has the
    user's name, and so no other member."""
    for folder in (path, *path.parents):
        found = folder.stat()
        others = stat.S_IWOTH | (0 if _is_own_group(found.st_gid) else stat.S_IWGRP)
        writable = found.st_mode & others and not found.st_mode & stat.S_ISVTX
        if writable or found.st_uid not in (0, os.geteuid()):
            raise StorageError(
                f"other users may write to {folder}, and what it holds would be executed"
                " (chmod go-w)"
            )


def _is_own_group(gid: int) -> bool:
    try:
        return grp.getgrgid(gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
