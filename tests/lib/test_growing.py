"""A state that grows at each step is kept at each step, and comes back as it was."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from tests.harness import eventually
from tests.lib.training import begun


class Metric:
    """A foreign object with a list of tensors, one more each step."""

    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value)

    def state_dict(self):
        return {"values": list(self.values), "count": len(self.values)}

    def load_state_dict(self, state):
        self.values = list(state["values"])
        assert state["count"] == len(self.values)

    def all(self):
        return torch.stack(self.values)


class Joined(dict):
    def add(self, value):
        self["losses"] = torch.cat([self.get("losses", torch.zeros(0)), value.view(1)])

    def all(self):
        return self["losses"]


def kept(checkpointer, step):
    """Whether a save found a slot. If not, all were on their way to the drive: wait for one."""
    if checkpointer.save(step):
        return True
    eventually(lambda: checkpointer._saver._held is not None)
    return False


@pytest.mark.parametrize("kind", [Metric, Joined])
@pytest.mark.parametrize("size", [64, 2400], ids=["small image", "image of 66 MiB"])
def test_every_step_of_a_state_that_grows_by_one_tensor_per_step_is_kept(sidecar, kind, size):
    grown, model = kind(), nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = begun({"model": model, "optimizer": optimizer, "grown": grown})
    for step in range(12):
        model(torch.ones(1, size)).sum().backward()
        optimizer.step()
        grown.add(torch.tensor(float(step)))
        assert checkpointer.save(step), checkpointer.stats
        # so that the next save finds a slot, however slow the drive is
        checkpointer.wait(step, "durable")
    layout = checkpointer._snapshots
    grown.add(torch.tensor(12.0))
    number = next(step for step in range(12, 600) if kept(checkpointer, step))
    assert checkpointer._snapshots is layout, "growth needs no new layout any more"
    checkpointer.close()
    assert checkpointer.stats.staged == 13
    other, again = kind(), nn.Linear(size, size)
    with begun(
        {"model": again, "optimizer": torch.optim.AdamW(again.parameters()), "grown": other}
    ) as successor:
        assert successor.epoch.parent.step == number
        assert torch.equal(other.all(), torch.arange(13.0))
        assert torch.equal(again.weight, model.weight)
        other.add(torch.tensor(13.0))
        assert successor.save(number + 1)


def test_a_tensor_that_changes_the_layout_at_each_save_is_logged_by_name(sidecar, caplog):
    grown = {"large": torch.zeros(0, 40_000)}
    checkpointer = begun({"grown": grown})
    for step in range(5):
        grown["large"] = torch.cat([grown["large"], torch.ones(1, 40_000)])
        assert checkpointer.save(step)
        checkpointer._saver.drain(timeout_s=20)
    checkpointer.close()
    (message,) = [message for message in caplog.messages if "layout of the state" in message]
    assert "grown.large was F32[2, 40000] and is F32[3, 40000]" in message


def test_the_memory_of_a_former_layout_is_freed_for_the_next_layout(sidecars, monkeypatch):
    sidecar = sidecars().start("--memory-limit", "20Mi")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    grown = {}
    checkpointer = begun({"grown": grown})
    for step in range(8):
        grown[f"part{step}"] = torch.ones(200_000)
        started = time.monotonic()
        assert checkpointer.save(step), checkpointer.stats
        assert time.monotonic() - started < 20
        checkpointer.wait(step, "staged")
    checkpointer.close()
    with begun({"grown": {}}) as again:
        assert again.epoch.parent.step == 7
