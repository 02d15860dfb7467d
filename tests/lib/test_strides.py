"""Tensors come back as they lie in memory, and dicts with what is noted on them."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import keepstep

WIDE = torch.arange(40_000.0)
LIES = {
    "a column": lambda: WIDE[:400].reshape(200, 2)[:, 1],
    "a large column": lambda: WIDE.reshape(20_000, 2)[:, 0],
    "every third element": lambda: WIDE[:300][::3],
    "a block": lambda: WIDE[:400].reshape(20, 20)[2:9, 3:17],
    "a transposed block": lambda: WIDE[:400].reshape(20, 20)[2:9, 3:17].T,
    "an expanded row": lambda: WIDE[:5].expand(3, 5),
    "an expanded scalar": lambda: torch.tensor(2.0).expand(4, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "an empty slice": lambda: WIDE[:8].reshape(4, 2)[:0, 1],
}


class Holder:
    """An object whose state is a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


@pytest.mark.parametrize("lies", LIES)
def test_a_tensor_comes_back_as_it_lay_in_memory(sidecar, lies):
    tensor = LIES[lies]()
    with keepstep.Checkpointer({"d": {"x": tensor}, "o": Holder(tensor)}) as checkpointer:
        checkpointer.restore()
        assert checkpointer.save(0)
    back, held = {"x": None}, Holder(None)
    with keepstep.Checkpointer({"d": back, "o": held}) as checkpointer:
        assert checkpointer.restore().step == 0
    for found in (back["x"], held.tensor):
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()
        assert found.dtype == tensor.dtype


def test_a_column_of_a_wide_table_does_not_bring_the_table_along(sidecar):
    column = torch.zeros(1000, 1000)[:, 3]
    with keepstep.Checkpointer({"d": {"x": column}}) as checkpointer:
        checkpointer.restore()
        assert checkpointer.save(0)
    back = {}
    with keepstep.Checkpointer({"d": back}) as checkpointer:
        checkpointer.restore()
    assert back["x"].untyped_storage().nbytes() == 4000


def test_what_is_noted_on_the_state_of_a_module_stays(sidecar):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    best, plain = model.state_dict(), OrderedDict(a=1)
    plain.note = {"of": "the script"}
    with keepstep.Checkpointer({"d": {"best": best, "plain": plain}}) as checkpointer:
        checkpointer.restore()
        assert checkpointer.save(0)
    live = {"best": OrderedDict(), "plain": OrderedDict()}
    kept = live["best"]
    with keepstep.Checkpointer({"d": live}) as checkpointer:
        checkpointer.restore()
    assert live["best"] is kept
    assert live["best"]._metadata == best._metadata
    assert type(live["best"]._metadata) is OrderedDict
    assert live["plain"].note == {"of": "the script"}
    assert model.load_state_dict(live["best"])
