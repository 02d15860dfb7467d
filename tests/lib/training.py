"""A trainer beside a real sidecar: begun, or a whole life of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import keepstep
from keepstep.checkpointer import Restored
from keepstep.client import copying


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


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies of the save thread wait until this is set."""
    gate, run = threading.Event(), copying.run_transfers

    def held(transfers: copying.Transfers, **options: Any) -> None:
        if threading.current_thread().name == "keepstep-save":
            assert gate.wait(30)
        run(transfers, **options)

    monkeypatch.setattr(copying, "run_transfers", held)
    return gate
