"""keepstep keeps every step of a PyTorch training run; see `Checkpointer`."""

from __future__ import annotations

import os
import sys

# `python -m keepstep.warm` in a project's directory: Python has put that first on the path, and a
# queue.py there is not the module that is meant below. argv[0] is "-m" while its packages load.
if (
    sys.argv[:1] == ["-m"]
    and "keepstep.warm" in sys.orig_argv
    and not getattr(sys.flags, "safe_path", False)
):
    del sys.path[0]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpointer import Checkpointer as Checkpointer
    from keepstep.checkpointer import Restored as Restored
    from keepstep.compile_cache import CompileCache as CompileCache
    from keepstep.integrations.loaders import Batches as Batches

from keepstep.errors import (
    CoverageError,
    DigestError,
    KeepstepError,
    MismatchError,
    NotDurableError,
    NothingCommonError,
    RestoreError,
    SidecarAbsent,
    SidecarError,
    SlotUnavailable,
    UsageError,
    WithinStepError,
    WorldChangedError,
)
from keepstep.version import __version__ as __version__

__all__ = [
    "Batches",
    "Checkpointer",
    "CompileCache",
    "CoverageError",
    "DigestError",
    "KeepstepError",
    "MismatchError",
    "NotDurableError",
    "NothingCommonError",
    "RestoreError",
    "Restored",
    "SidecarAbsent",
    "SidecarError",
    "SlotUnavailable",
    "UsageError",
    "WithinStepError",
    "WorldChangedError",
]


if os.environ.get("KEEPSTEP_SOCKET"):  # a training process: its errors are of interest from here on
    from keepstep.client import uncaught as _uncaught

    _uncaught.watch_uncaught_errors(_uncaught.report_uncaught_error)

if os.environ.get("KEEPSTEP_COMPILE_CACHE_DIR"):  # torch reads its variables when it first compiles
    from keepstep import compile_cache as _compile_cache

    _compile_cache.use_mounted_cache()


def __getattr__(name: str) -> Any:
    # The sidecar uses the pure modules where torch is not installed, so torch comes in only here.
    if name in ("Checkpointer", "Restored"):
        from keepstep import checkpointer

        return getattr(checkpointer, name)
    if name == "CompileCache":
        from keepstep.compile_cache import CompileCache

        return CompileCache
    if name == "Batches":
        from keepstep.integrations.loaders import Batches

        return Batches
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
