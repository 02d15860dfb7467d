"""Which steps become durable when nobody chose, and when somebody did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trainer import FakeTrainer

from tests.harness import SidecarProcess


def _trained(sidecar: SidecarProcess, trainer: FakeTrainer, steps: int) -> dict[str, Any]:
    """Each step becomes durable before the next one; the status then."""
    trainer.begin_run()
    for step in range(steps):
        assert trainer.wait(trainer.stage(step), "committed").reached
    status: dict[str, Any] = sidecar.get("/v1/status")
    return status


@pytest.mark.parametrize("slots", ["2", "4"])
def test_without_a_word_every_step_that_the_drive_takes_becomes_durable(
    sidecars: Callable[..., SidecarProcess], trainers: Callable[..., FakeTrainer], slots: str
) -> None:
    sidecar = sidecars().start("--slots", slots)
    status = _trained(sidecar, trainers(sidecar.socket), 30)
    assert status["persisted"] == 30
    assert status["persist_interval"]["steps"] == 1
    assert status["persist_interval"]["limit"] == "step"
    measured = status["persist_measured"]
    assert 0 < measured["write_s"] < measured["step_s"]
    assert measured["image_bytes"] > 64 << 10
    assert measured["drive_bytes"] > 1 << 20
    assert measured["stall_s"] is None, "no step without a write, so nobody can say"
