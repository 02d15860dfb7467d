"""Weights that torchao has quantised: kept as they are, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, PerGroup, quantize_

from keepstep.errors import MismatchError
from tests.lib.training import bring_back, keep


def made(seed: int, group: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 2))
    model[0].requires_grad_(False)
    quantize_(model[0], Int8WeightOnlyConfig(granularity=PerGroup(group)))
    return model


def test_a_layer_with_another_quantisation_group_size_is_refused_and_nothing_is_changed(sidecar):
    first = made(0, 32)
    keep({"model": first})
    other = made(1, 64)
    before = other[0].weight.dequantize(), other[1].weight.clone()
    with pytest.raises(MismatchError, match=r"model\.0\.weight\.scale: .* in the checkpoint"):
        bring_back({"model": other})
    assert torch.equal(other[0].weight.dequantize(), before[0])
    assert torch.equal(other[1].weight, before[1])
    again = made(2, 32)
    bring_back({"model": again})
    assert torch.equal(again[0].weight.dequantize(), first[0].weight.dequantize())
