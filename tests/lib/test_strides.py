"""Tensors come back as they lie in memory, and dicts with what is noted on them."""

from collections import OrderedDict

import torch
from torch import nn

import keepstep


def test_saving_a_column_view_does_not_save_the_whole_table(sidecar):
    column = torch.zeros(1000, 1000)[:, 3]
    with keepstep.Checkpointer({"d": {"x": column}}) as checkpointer:
        checkpointer.restore()
        assert checkpointer.save(0)
    back = {}
    with keepstep.Checkpointer({"d": back}) as checkpointer:
        checkpointer.restore()
    assert back["x"].untyped_storage().nbytes() == 4000


def test_attributes_of_a_saved_state_dict_such_as_its_metadata_are_restored(sidecar):
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
