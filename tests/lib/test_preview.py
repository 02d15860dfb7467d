"""What a step holds of one component, before anything is restored; and a second training."""

from __future__ import annotations

import torch
from torch import nn

import keepstep
from tests.lib.training import begun, bring_back, keep


def state(**progress):
    model = nn.Linear(3, 3)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "progress": progress}


def test_preview_reads_one_component_and_changes_nothing(sidecar):
    keep(state(epoch=4, average=torch.arange(3.0), words=["a"]), step=7)
    here = state(epoch=0)
    weight = here["model"].weight.detach().clone()
    checkpointer = keepstep.Checkpointer(here)
    for _ in range(2):
        step, progress = checkpointer.preview("progress")
        assert (step, progress["epoch"], progress["words"]) == (7, 4, ["a"])
        assert torch.equal(progress["average"], torch.arange(3.0))
    assert torch.equal(here["model"].weight, weight)
    assert here["progress"] == {"epoch": 0}
    assert checkpointer.epoch is None
    assert checkpointer.restore().step == 7
    assert here["progress"]["epoch"] == 4
    assert checkpointer.save(8), "the epoch is the one after that of the step"
    checkpointer.close()
    assert bring_back(state()).step == 8


def test_components_can_be_built_from_the_preview_of_a_step(sidecar):
    def layers(count):
        return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    keep({"model": layers(3), "progress": {"layers": 3}})
    components = {"progress": {"layers": 1}}
    checkpointer = keepstep.Checkpointer(components)
    _, progress = checkpointer.preview("progress")
    components["model"] = layers(progress["layers"])
    assert checkpointer.restore() is not None
    checkpointer.close()


def test_preview_of_an_empty_or_unknown_component_returns_an_empty_dict(sidecar):
    checkpointer = begun({"progress": {"epoch": 1}}, strict=True)
    checkpointer.save(0)
    checkpointer.close()
    with keepstep.Checkpointer({"progress": {}}) as other:
        assert other.preview("counts") == (0, {})


def test_preview_returns_none_without_a_step_or_a_sidecar(sidecar, monkeypatch):
    with keepstep.Checkpointer({"progress": {}}) as checkpointer:
        assert checkpointer.preview("progress") is None
        assert checkpointer.restore() is None
    monkeypatch.delenv("KEEPSTEP_SOCKET")
    assert keepstep.Checkpointer({"progress": {}}).preview("progress") is None


def test_a_second_training_in_a_process_is_warned_that_it_resumes_from_the_first(sidecar, caplog):
    keep(state(), step=5)
    assert "this process has kept steps of this run before" not in caplog.text
    bring_back(state())
    assert "goes on from step 5 of that training" in caplog.text
    assert "run=NAME" in caplog.text
