"""What torch.compile and Triton compiled, for the next life: beside the run, or in its steps.

It is executed: machine code, and pickles. So the caches beside the run are used only where this
user alone may write, and never where its owner chose another place; and in steps, which go to other
machines, they are kept only if the program asks for that (`CompileCache`).
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError, UsageError

if TYPE_CHECKING:
    import torch

DIRECTORY_ENV: Final = "KEEPSTEP_COMPILE_CACHE_DIR"
"""In a pod: the directory that admission mounted for this."""

POD_NAME: Final = ".compile-cache"
"""The directory on a pod's volume, beside the sidecar's. No run has such a name."""

_PARTS: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_KEY: Final = "torch_compile_cache"
_log: Final = logging.getLogger("keepstep")
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
        if _is_first_rank():
            _log.warning("keepstep: no compile cache is kept: %s [compile_cache.disabled]", error)


class CompileCache:
    """`{"model": model, "compiled": keepstep.CompileCache()}`: each step holds what torch.compile
    compiled, so that a restart on another machine need not compile again.

    It needs torch's portable caches (`torch.compiler.save_cache_artifacts`), which leave out what a
    C++ compiler made for a CPU. Each rank keeps its own, in each step; what fits no graph of the
    next life, such as that of another torch or device, is not used. Of more than `limit_bytes` the
    newest are not kept, which a line in the log says. A run may begin and cease to use this. torch
    forgets what was taken: a second CompileCache, or a call of the script's own, gets nothing.

    A restore executes them: use this only where those who may write the run's steps (in an archive,
    on other machines) may run code in the training. Raises UsageError if this torch has no such
    caches.
    """

    def __init__(self, *, limit_bytes: int = 64 << 20) -> None:
        import torch

        try:
            from torch.compiler import _cache

            self._is_new = _cache.CacheArtifactManager.need_serialize
            self._forget = _cache.CacheArtifactManager.clear
            _keys(_cache.CacheInfo())
        except (ImportError, AttributeError):
            raise UsageError(
                f"torch {torch.__version__} has no portable compile caches: leave CompileCache out"
            ) from None
        self._limit_bytes = limit_bytes
        self._keys = set[tuple[str, str]]()
        self._parts: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        if self._is_new():
            try:
                self._take()
            except Exception as error:
                if _is_first_rank():
                    _log.warning(
                        "keepstep: what was compiled is in no step: %r [compile_cache.unsaved]",
                        error,
                    )
        return {_KEY: list(self._parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in state[_KEY]:
            self._load(part.clone())

    def _load(self, part: torch.Tensor) -> None:
        import torch

        try:
            found = torch.compiler.load_cache_artifacts(part.numpy().tobytes())
        except Exception as error:  # what is missing is compiled again
            if _is_first_rank():
                _log.warning(
                    "keepstep: the step's compile cache is not used: %r [compile_cache.unusable]",
                    error,
                )
            return
        # None: torch has logged why
        if found is not None and not (keys := _keys(found)) <= self._keys:
            self._parts.append(part)
            self._keys |= keys

    def _take(self) -> None:
        """Keep what is new as a part of its own. Torch would give all again, and take only the last
        of each kind from that."""
        import torch

        taken = torch.compiler.save_cache_artifacts()
        self._forget()
        if taken is None or (keys := _keys(taken[1])) <= self._keys:
            return
        self._keys |= keys
        size = len(taken[0]) + sum(part.numel() for part in self._parts)
        if size > self._limit_bytes:
            raise StorageError(
                f"with it there are {size >> 20} MiB, more than limit_bytes={self._limit_bytes}"
            )
        self._parts.append(torch.frombuffer(bytearray(taken[0]), dtype=torch.uint8))


def is_compile_cache(keys: Iterable[object]) -> bool:
    """Whether a component that was saved with these keys was a `CompileCache`."""
    return [*keys] == [_KEY]


def _is_first_rank() -> bool:
    """What all ranks find is logged by one."""
    return os.environ.get("RANK", "0") == "0"


def _keys(info: Any) -> set[tuple[str, str]]:
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}
