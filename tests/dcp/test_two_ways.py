"""A step of `dcp.save` met by a `Checkpointer`, and the other way round: it works as far as names
allow, or the error says who saved it and what to use."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import keepstep
import keepstep.dcp
from keepstep.errors import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def load(state: dict[str, object]) -> None:
    dcp.load(state, storage_reader=keepstep.dcp.StorageReader(), no_dist=True)


@pytest.mark.parametrize("alike", [True, False], ids=["of-the-same-names", "of-other-names"])
def test_a_checkpointer_refuses_a_step_that_dcp_saved_and_names_the_right_reader(
    sidecar, alike: bool
) -> None:
    saved = {"part": {"w": torch.ones(4)}} if alike else {"other": torch.ones(5), "text": "x"}
    dcp.save(saved, storage_writer=keepstep.dcp.StorageWriter(step=1), no_dist=True)
    keepstep.dcp.close()
    part = {"w": torch.zeros(4)}
    with pytest.raises(MismatchError, match=r"keepstep\.dcp\.StorageReader") as caught:
        keepstep.Checkpointer({"part": part}).restore()
    assert "dcp.save" in str(caught.value)
    assert not part["w"].any()


def test_dcp_loads_the_tensors_of_a_checkpointer_step_by_name_with_a_warning(
    sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    with keepstep.Checkpointer({"model": model, "extra": {"count": 5}}) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
    state: dict[str, object] = {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}}
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        load(state)
    assert torch.equal(state["model"]["weight"], model.weight)  # type: ignore[index]
    assert "keepstep.Checkpointer restores" in caplog.text
    with pytest.raises(CheckpointException, match=r"extra\.count"):
        load({**state, "extra": {"count": 0}})


def test_a_dcp_training_resumes_from_a_step_of_a_checkpointer(sidecar) -> None:
    part = {"w": torch.full((4,), 3.0)}
    with keepstep.Checkpointer({"part": part}) as checkpointer:
        checkpointer.restore()
        checkpointer.save(3)
    state = {"part.w": torch.zeros(4)}
    load(state)
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(step=4), no_dist=True)
    assert sidecar.get("/v1/status")["epoch"]["parent"]["step"] == 3
