"""Tensors come back as they lie in memory, and dicts with what is noted on them."""

from collections import OrderedDict

import torch
from torch import nn

import keepstep


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
