"""A restore is the state that was saved: the same keys, kinds, bytes and strides, and no others."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import keepstep
from keepstep.restore.restore import PartialRestore
from tests.harness import eventually
from tests.lib.lives import bring_back, keep


@pytest.fixture(params=["own image", "another world"])
def again(request, tmp_path):
    """Saves the components of one life and restores them into those of the next."""

    def move(saved, live):
        keep(saved, tmp_path / "slot")
        bring_back(live, tmp_path / "slot", direct=request.param == "own image")
        return live

    return move


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8)


def assert_same(one, other):
    """Bit-equal tensors, in the same places in memory."""
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert torch.equal(bits(one), bits(other))


def test_the_image_is_unmapped_once_it_is_restored(again, tmp_path):
    gc.disable()  # it is let go of, and not found later
    try:
        again({"p": {"t": torch.ones(2)}}, {"p": {"t": torch.zeros(2)}})
        slot = str(tmp_path / "slot")
        eventually(lambda: slot not in Path("/proc/self/maps").read_text())
    finally:
        gc.enable()


# --- dicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_a_tensor_that_a_failed_attempt_has_begun_may_give_way_to_a_new_one(tmp_path, direct):
    keep({"p": {"grown": torch.ones(3)}}, tmp_path / "slot")
    live = {"grown": torch.zeros(2), "gone": torch.zeros(2)}
    with PartialRestore() as torn:
        torn.begin(live.values())
        bring_back({"p": live}, tmp_path / "slot", direct=direct, partial=torn)
    assert list(live) == ["grown"]
    assert live["grown"].tolist() == [1, 1, 1]


# --- modules -------------------------------------------------------------------------------------


def test_weights_that_are_tied_here_may_have_been_two_that_are_equal(again):
    saved, live = (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2))
    saved["b"].load_state_dict(saved["a"].state_dict())
    live["b"].weight = live["a"].weight
    again({"m": saved}, {"m": live})
    assert_same(live["b"].weight, saved["a"].weight)


def test_weights_that_are_tied_here_but_were_not_are_refused_by_name(again):
    saved, live = (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2))
    live["b"].weight = live["a"].weight
    before = live["a"].weight.clone()
    with pytest.raises(keepstep.MismatchError, match=r"m\.b\.weight: one tensor with m\.a\.weight"):
        again({"m": saved}, {"m": live})
    assert torch.equal(live["a"].weight, before)


def test_a_dict_that_shares_a_weight_here_takes_nothing_from_the_module(again):
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    best = {"best": live.weight}
    again({"p": {"best": torch.ones(2, 2)}, "m": saved}, {"p": best, "m": live})
    assert_same(live.weight, saved.weight)
    assert torch.equal(best["best"], torch.ones(2, 2))


@pytest.mark.parametrize("direct", [True, False])
def test_what_a_module_refuses_names_it_and_says_what_to_do(tmp_path, direct):
    class Refusing(nn.Linear):
        def _load_from_state_dict(self, *_):
            raise KeyError("scale")

    keep({"m": nn.Linear(2, 2)}, tmp_path / "slot")
    with pytest.raises(keepstep.MismatchError, match=r"m: its load_state_dict\(\) refuses .*scale"):
        bring_back({"m": Refusing(2, 2)}, tmp_path / "slot", direct=direct)


# --- names and keys ------------------------------------------------------------------------------


def test_components_whose_names_run_into_each_other_are_told_apart(again):
    saved = {"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "a.b": nn.Linear(2, 2)}
    live = {"a.b": nn.Linear(2, 2), "a": nn.ModuleDict({"b": nn.Linear(2, 2)})}
    again(saved, live)
    assert_same(live["a.b"].weight, saved["a.b"].weight)
    assert_same(live["a"]["b"].weight, saved["a"]["b"].weight)


# --- optimizers ----------------------------------------------------------------------------------


def assert_tree(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert_same(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_tree(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_tree(left, right)
    else:
        assert one == other


def two_weights():
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})


def stepped(model, order, optimizer=torch.optim.AdamW, **options):
    made = optimizer([model[name].weight for name in order], lr=1e-2, **options)
    for number, one in enumerate("ab"):
        model[one].weight.grad = torch.full_like(model[one].weight, 10.0**number)
    made.step(*([lambda: torch.tensor(1.0)] if optimizer is torch.optim.LBFGS else []))
    return made


def test_flat_state_that_goes_by_the_order_of_the_parameters_is_not_turned_round(again):
    model, other = two_weights(), two_weights()
    saved = stepped(model, "ab", torch.optim.LBFGS)
    live = torch.optim.LBFGS([other["b"].weight, other["a"].weight])
    again({"m": model, "o": saved}, {"m": other, "o": live})
    assert live._params[0] is other["a"].weight
    assert_tree(live.state[other["a"].weight], saved.state[model["a"].weight])


def test_groups_keep_their_options_and_their_order(again, caplog):
    def grouped(model, order):
        made = torch.optim.SGD([model[order[0]].weight], lr=rates[order[0]], momentum=0.9)
        made.add_param_group({"params": [model[order[1]].weight], "lr": rates[order[1]]})
        return made

    rates = {"a": 0.1, "b": 0.2}
    model, other = two_weights(), two_weights()
    saved = grouped(model, "ab")
    rates = {"a": 0.5, "b": 0.6}
    live = grouped(other, "ba")
    again({"m": model, "o": saved}, {"m": other, "o": live})
    by_weight = {id(one["params"][0]): one["lr"] for one in live.param_groups}
    assert by_weight == {id(other["a"].weight): 0.1, id(other["b"].weight): 0.2}
    assert live.state_dict() == saved.state_dict()
    assert "in the order of the save" in caplog.text


def test_parameters_of_another_shape_are_refused_by_name_and_nothing_is_changed(again):
    def bare(*shapes):
        made = torch.optim.Adam([nn.Parameter(torch.ones(shape)) for shape in shapes])
        for one in made.param_groups[0]["params"]:
            one.grad = torch.ones_like(one)
        made.step()
        return made

    live = bare((4, 8), (8, 8))
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(keepstep.MismatchError) as error:
        again({"o": bare((8, 8), (4, 8))}, {"o": live})
    assert "o: its parameter 0: [8, 8] in the checkpoint, [4, 8] here" in str(error.value)
    assert "o: its parameter 1: [4, 8] in the checkpoint, [8, 8] here" in str(error.value)
    assert_tree(live.state_dict(), before)


def optimized(groups):
    model = nn.ModuleDict({one: nn.Linear(2, 2, bias=False) for one in "abc"})
    rows = [{"params": [model[one].weight for one in group]} for group in groups]
    return {"m": model, "o": torch.optim.SGD(rows, lr=0.1)}


@pytest.mark.parametrize("groups", [["a"], ["ab", "c"], ["ab"]])
def test_groups_of_other_parameters_are_refused(again, groups):
    with pytest.raises(keepstep.MismatchError, match=r"o: (has the parameter|parameter groups of)"):
        again(optimized(["ac", "b"]), optimized(groups))
