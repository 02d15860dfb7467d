"""Shards that are whole, each in itself, but do not make up a step: the real restore refuses."""

from __future__ import annotations

import json
import time

import pytest
import torch

import keepstep
from keepstep.errors import CoverageError, RestoreError
from keepstep.image import ControlPage, Layout, TensorRole, TensorSpec, extras_codec
from keepstep.steps import StepId
from tests.sidecar.trainer import FakeTrainer

SKELETON = json.dumps(["d", [["state", ["d", [["w", ["t", "state.w"]]]]]]])
EXTRAS = extras_codec.encode({"values": []}, trusted=False)


class Forger(FakeTrainer):
    """A rank that says it holds `[begin, end)` of a tensor of ten elements."""

    def __init__(self, path, rank, begin, end):
        super().__init__(path, rank, 2)
        spec = TensorSpec("state.w", "F32", (end - begin,), TensorRole.REST, (begin,), (10,))
        self.layout = Layout.build([spec], rank=rank, world=2, skeleton=SKELETON)

    def fill(self, step):
        self._write(EXTRAS, self.layout.extras_begin)
        control = ControlPage(
            run=self.granted.run, layout=self.layout.id, epoch=self.epoch, rank=self.rank,
            world=2, step=step, extras_bytes=len(EXTRAS), staged_at=time.time(),
        )  # fmt: skip
        self._write(control.to_bytes(), self.layout.control_begin)


def committed(sidecar, *parts):
    forgers = [Forger(sidecar.socket, rank, *part) for rank, part in enumerate(parts)]
    for forger in forgers:
        forger.begin_run()
    ids = {forger.stage(4) for forger in forgers}
    for forger in forgers:
        assert forger.wait(StepId(forger.epoch.id, 4), "committed", flush=True).reached
        forger.disconnect()
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("parts", "culprits"),
    [
        (
            ((0, 6), (5, 10)),
            ["state.w", "offsets [5], sizes [1]", "overlap", "rank-00000-of-00002"],
        ),
        (((0, 4), (5, 10)), ["state.w: no rank holds offsets [4], sizes [1]"]),
    ],
    ids=["overlapping", "missing"],
)
def test_boxes_with_gaps_or_overlaps_are_refused_and_their_shards_are_kept(
    sidecar, parts, culprits
):
    committed(sidecar, *parts)
    before = sorted(sidecar.root.glob("0*/rank-*"))
    live = torch.full((10,), -1.0)
    checkpointer = keepstep.Checkpointer({"state": {"w": live}}, strict=True)
    try:
        with pytest.raises((CoverageError, RestoreError)) as caught:
            checkpointer.restore()
    finally:
        checkpointer.close()
    for culprit in culprits:
        assert culprit in str(caught.value)
    assert bool((live == -1).all()), "nothing was changed"
    assert sorted(sidecar.root.glob("0*/rank-*")) == before != []
