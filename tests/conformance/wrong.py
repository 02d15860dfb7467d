"""Rows that are wrong on purpose, each in one way: after a restore by keepstep, and only then, one
thing is not as it was. Each must be seen."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.conformance.rows.small import trained
from tests.conformance.table import Table, Training

TABLE = Table("Wrong")


def _spoiled(spoil: Callable[[dict[str, Any], nn.Module, torch.optim.Optimizer], Any]) -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    item = {"n": 1}
    state: dict[str, Any] = {
        **{"b": item, "a": item, "x": torch.ones(4, 2), "list": [1, 2.0], "yes": True},
        **{"array": np.ones(3), "zero": 0.0, "count": 0},
    }
    state["view"] = state["x"][1]

    def restored() -> None:
        if "KEEPSTEP_SOCKET" in os.environ:
            spoil(state, model, optimizer)

    return trained(model, optimizer, also={"state": state}, restored=restored)


def _next_bit(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[0] += 1


def _reorder(state: dict[str, Any], key: str) -> None:
    state[key] = state.pop(key)


WRONG: dict[str, Callable[[dict[str, Any], nn.Module, torch.optim.Optimizer], Any]] = {
    "one bit of a weight": lambda s, m, o: _next_bit(m[0].weight),
    "one bit of the optimizer's state": lambda s, m, o: _next_bit(o.state[m[0].bias]["exp_avg"]),
    "a learning rate": lambda s, m, o: o.param_groups[0].update(lr=math.nextafter(0.01, 1)),
    "a step count": lambda s, m, o: o.state[m[0].bias]["step"].add_(1),
    "a dtype": lambda s, m, o: s.update(x=s["x"].double()),
    "a shape": lambda s, m, o: s.update(x=s["x"].reshape(2, 4)),
    "strides": lambda s, m, o: s.update(x=s["x"].t().contiguous().t()),
    "the order of keys": lambda s, m, o: _reorder(s, "b"),
    "a missing key": lambda s, m, o: s.pop("list"),
    "a further key": lambda s, m, o: s.update(more=None),
    "a type": lambda s, m, o: s.update(list=(1, 2.0)),
    "a number for a boolean": lambda s, m, o: s.update(yes=1),
    "the sign of zero": lambda s, m, o: s.update(zero=-0.0),
    "an object that became two": lambda s, m, o: s.update(a=dict(s["a"])),
    "a storage that became two": lambda s, m, o: s.update(view=s["view"].clone()),
    "a tensor for an array": lambda s, m, o: s.update(array=torch.ones(3, dtype=torch.float64)),
    "a parameter that the optimizer steps no more": lambda s, m, o: setattr(
        m[0], "bias", nn.Parameter(m[0].bias.detach().clone())
    ),
    "a parameter that is frozen": lambda s, m, o: m[1].bias.requires_grad_(False),
    "the random numbers of torch": lambda s, m, o: torch.rand(1),
    "the random numbers of numpy": lambda s, m, o: np.random.random(),
    "the random numbers of Python": lambda s, m, o: random.random(),
    "evaluation instead of training": lambda s, m, o: m.eval(),
}
for _name, _spoil in WRONG.items():
    TABLE.add(_name, _spoiled, _spoil, kills=(2,), steps=4)
TABLE.add("nothing", lambda: _spoiled(lambda s, m, o: None), kills=(2,), steps=4)
