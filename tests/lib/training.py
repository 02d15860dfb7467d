"""A trainer beside a real sidecar: begun, or a whole life of it."""

from __future__ import annotations

from typing import Any

import keepstep
from keepstep.checkpointer import Restored


def begun(components: Any, **options: Any) -> keepstep.Checkpointer:
    """A checkpointer that has restored, and can save."""
    checkpointer = keepstep.Checkpointer(components, **options)
    checkpointer.restore()
    return checkpointer


def keep(components: Any, step: int = 0, **options: Any) -> None:
    """One life, which saves once."""
    with begun(components, strict=True, **options) as checkpointer:
        checkpointer.save(step)


def bring_back(components: Any, **options: Any) -> Restored | None:
    """Another life: restores and ends."""
    checkpointer = keepstep.Checkpointer(components, strict=True, **options)
    try:
        return checkpointer.restore()
    finally:
        checkpointer.close()
