"""A plugin of pytest for accelerate's own tests: keepstep in place of what they test.

`prepare` is followed by the lines that docs/frameworks.md adds to a loop on accelerate.
`save_state` writes its directory as ever, and keeps a step. `load_state` reads nothing of a
directory: it brings back the step that was kept with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader

import keepstep
from tests.conftest import memory_dir, sidecar, sidecars  # noqa: F401  # fixtures
from tests.harness import SidecarProcess

_PREPARE, _SAVE_STATE = Accelerator.prepare, Accelerator.save_state


class _Batches(keepstep.Batches):
    """Of the class that a test expects of a loader."""

    @property
    def __class__(self) -> Any:
        return self.loader.__class__


class KeptTest:
    """Components, Checkpointer and steps of one test, which may make several Accelerators, one
    after the other."""

    def __init__(self) -> None:
        self._components: dict[str, Any] = {}
        self._checkpointer: keepstep.Checkpointer | None = None
        self._steps: dict[str, int] = {}

    def prepare(self, accelerator: Accelerator, *objects: Any) -> Any:
        prepared = _PREPARE(accelerator, *objects)
        kept = [_Batches(part) if isinstance(part, DataLoader) else part for part in prepared]
        self._components = {str(at): part for at, part in enumerate(kept)}
        self._restore()
        return kept

    def save_state(self, *args: Any, **options: Any) -> str:
        directory: str = _SAVE_STATE(*args, **options)
        step = self._steps[os.path.abspath(directory)] = len(self._steps)
        assert self._checkpointer is not None
        assert self._checkpointer.save(step)
        return directory

    def load_state(self, _: Accelerator, directory: str | None = None) -> None:
        path = os.path.abspath(directory) if directory else list(self._steps)[-1]
        at = self._restore(self._steps[path])
        assert at is not None
        assert at.step == self._steps[path]

    def _restore(self, step: int | None = None) -> keepstep.Restored | None:
        self.close()
        self._checkpointer = keepstep.Checkpointer(self._components)
        return self._checkpointer.restore(step=step)

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


@pytest.fixture(autouse=True)
def _in_place(
    sidecar: SidecarProcess,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    kept = KeptTest()
    monkeypatch.setattr(Accelerator, "prepare", lambda *args: kept.prepare(*args))
    monkeypatch.setattr(Accelerator, "save_state", lambda *a, **kw: kept.save_state(*a, **kw))
    monkeypatch.setattr(Accelerator, "load_state", lambda *args: kept.load_state(*args))
    yield
    kept.close()
