"""Where torch.compile and Triton keep what they compiled: beside the run, for its next life.

What lies there is executed: machine code, and pickles. So it is used only where this user alone may
write, and never where its owner chose another place.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError

DIRECTORY_ENV: Final = "KEEPSTEP_COMPILE_CACHE_DIR"
"""In a pod: the directory that admission mounted for this."""

POD_NAME: Final = ".compile-cache"
"""The directory on a pod's volume, beside the sidecar's. No run has such a name."""

_PARTS: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_LEAST_FREE_BYTES: Final = 1 << 30
_DEEPEST: Final = 16


def has_chosen_cache(environment: Mapping[str, str]) -> bool:
    """Whether the user chose a place. Inductor puts Triton's cache into its own, so one variable
    decides for both."""
    return any(environment.get(name) for name in _PARTS)


def cache_variables(parent: OpenDirectory, name: str) -> dict[str, str]:
    """What tells torch and Triton to keep their caches in the directory `name` of `parent`, which
    is made if it is missing. Raises OSError, and StorageError if it cannot be used."""
    parent.make(name, 0o700)
    place = parent.open_subdirectory(name)
    found, drive = os.fstat(place.fd), os.fstatvfs(place.fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StorageError(f"{place.path} is not this user's alone: move it away")
    if drive.f_flag & os.ST_NOEXEC:
        raise StorageError(f"nothing on the drive of {place.path} may be executed (noexec)")
    if drive.f_bavail * drive.f_frsize < _LEAST_FREE_BYTES:
        raise StorageError(f"the drive of {place.path} has less than 1 GiB left")
    return {variable: str(place.path / part) for variable, part in _PARTS.items()}


def clear_if_over_limit(parent: OpenDirectory, name: str, *, limit_bytes: int) -> None:
    """Remove the caches in the directory `name` if they take more than that of the drive. Times of
    access, by which old ones could be told, are not kept everywhere. Raises OSError."""
    found = parent.open_subdirectory(name).walk(levels=_DEEPEST)
    if sum(info.st_blocks * 512 for _, info in found) > limit_bytes:
        parent.remove(name)


def use_mounted_cache() -> None:
    """In a pod: have torch use the mounted directory, with a part of its own for each user. What
    stands in the way is logged; nothing is raised."""
    mounted = os.environ.get(DIRECTORY_ENV)
    if not mounted or has_chosen_cache(os.environ):
        return
    try:
        place = OpenDirectory.open_path(Path(mounted))
        os.environ.update(cache_variables(place, str(os.geteuid())))
    except (OSError, StorageError) as error:
        if os.environ.get("RANK", "0") == "0":
            logging.getLogger("keepstep").warning(
                "keepstep: no compile cache is kept: %s [compile_cache.disabled]", error
            )
