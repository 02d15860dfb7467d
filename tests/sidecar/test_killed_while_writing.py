"""A sidecar killed at every point of writing, publishing and retiring, with a live trainer."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable

import pytest
from trainer import FakeTrainer, content, read_image

from keepstep.errors import SidecarError
from keepstep.steps import StepId
from keepstep_sidecar.volume.files import FAULTS_ENV
from tests.harness import SidecarProcess, verify_image
from tests.volume.points import FAULT_POINTS

_KILLED = ("write", "spare", "publish", "retire", "record")
_KILLABLE = [p for p in FAULT_POINTS if p.split(".")[0] in _KILLED]


@pytest.mark.parametrize("point", _KILLABLE)
def test_a_kill_at_any_point_of_writing_loses_no_commit_and_leaves_no_torn_step(
    sidecars: Callable[..., SidecarProcess], trainers: Callable[..., FakeTrainer], point: str
) -> None:
    sidecar = sidecars().start("--keep", "1", **{FAULTS_ENV: f"{point}:kill"})
    trainer = trainers(sidecar.socket)
    with contextlib.suppress(OSError, http.client.HTTPException, SidecarError):
        trainer.begin_run()
        for step in range(1, 300):  # a point of `spare` may take long to be passed
            trainer.wait(trainer.stage(step), "committed", flush=True)
            for place in sidecar.root.glob("0*"):
                with contextlib.suppress(OSError):  # it was retired; else there is one to unlink
                    (place / "notes.txt").touch()
    assert sidecar.process is not None
    assert sidecar.process.wait(10) == -9, f"{point} was never passed"
    trainer.disconnect()
    before = [path for path in sidecar.root.glob("0*") if path.is_dir()]
    sidecar.start("--keep", "1")
    successor = trainers(sidecar.socket)
    successor.connect()
    offered = {candidate.id for candidate in successor.candidates().candidates}
    if before:
        assert offered, "a commit was there, and nothing is offered"
    for step_id in offered:
        opened = successor.open(step_id)
        assert read_image(successor.layout, opened.path) == content(successor.layout, step_id.step)
    sidecar.terminate()  # it may go on retiring: what it leaves is read when nothing moves
    for path in sidecar.root.glob("0*/rank-*"):
        control = verify_image(memoryview(path.read_bytes()), successor.layout)
        assert control.step_id == StepId.parse(path.parent.name)
