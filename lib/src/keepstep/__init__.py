"""keepstep keeps every step of a PyTorch training run; see `Checkpointer`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpointer import Checkpointer as Checkpointer
    from keepstep.checkpointer import Restored as Restored

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
    "Checkpointer",
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

    _uncaught.watch(_uncaught.tell)


def __getattr__(name: str) -> Any:
    # The sidecar uses the pure modules where torch is not installed, so torch comes in only here.
    if name in ("Checkpointer", "Restored"):
        from keepstep import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
