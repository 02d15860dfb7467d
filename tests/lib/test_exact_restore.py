"""A restore is the state that was saved: the same keys, kinds, bytes and strides, and no others."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import keepstep
from keepstep.restore.rank_restore import FillGuard
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


def assert_same(first, other):
    """Bit-equal tensors, in the same places in memory."""
    assert (first.dtype, first.shape, first.stride()) == (other.dtype, other.shape, other.stride())
    assert torch.equal(bits(first), bits(other))


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
def test_a_tensor_that_a_failed_restore_has_partly_filled_can_be_replaced(tmp_path, direct):
    keep({"p": {"grown": torch.ones(3)}}, tmp_path / "slot")
    live = {"grown": torch.zeros(2), "gone": torch.zeros(2)}
    with FillGuard() as torn:
        torn.begin(live.values())
        bring_back({"p": live}, tmp_path / "slot", direct=direct, partial=torn)
    assert list(live) == ["grown"]
    assert live["grown"].tolist() == [1, 1, 1]


# --- modules -------------------------------------------------------------------------------------


class WithExtraState(nn.Module):
    """What it keeps beside its parameters exists only once it was used."""

    def __init__(self, history=None):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.history = history

    def get_extra_state(self):
        return {"history": self.history, "n": 1}

    def set_extra_state(self, state):
        self.history = state["history"]


@pytest.mark.parametrize("before", [None, torch.zeros(3), torch.zeros(1)])
def test_a_modules_extra_state_may_hold_new_and_grown_tensors(again, before):
    saved, live = WithExtraState(torch.arange(3.0)), WithExtraState(before)
    again({"m": nn.Sequential(saved)}, {"m": nn.Sequential(live)})
    assert_same(live.history, saved.history)
    assert_same(live.inner.weight, saved.inner.weight)


class Doubled(nn.Linear):
    """Its state_dict has a copy of its weight, times two; its bias as it is."""

    def __init__(self):
        super().__init__(2, 2)
        self._register_state_dict_hook(
            lambda module, tree, *_: tree.update(weight=module.weight * 2)
        )


def test_a_module_whose_state_dict_returns_copies_is_restored_by_load_state_dict(again):
    saved, live = Doubled(), Doubled()
    bias = live.bias
    again({"m": saved}, {"m": live})
    assert torch.equal(live.weight, saved.weight * 2)
    assert torch.equal(live.bias, saved.bias)
    assert live.bias is bias


def test_tied_weights_can_be_restored_from_two_equal_tensors(again):
    saved, live = (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2))
    saved["b"].load_state_dict(saved["a"].state_dict())
    live["b"].weight = live["a"].weight
    again({"m": saved}, {"m": live})
    assert_same(live["b"].weight, saved["a"].weight)


def test_tied_weights_are_refused_if_the_saved_tensors_differ(again):
    saved, live = (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2))
    live["b"].weight = live["a"].weight
    before = live["a"].weight.clone()
    with pytest.raises(keepstep.MismatchError, match=r"m\.b\.weight: one tensor with m\.a\.weight"):
        again({"m": saved}, {"m": live})
    assert torch.equal(live["a"].weight, before)


def test_a_dict_that_shares_a_weight_with_a_module_does_not_change_that_weight(again):
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    best = {"best": live.weight}
    again({"p": {"best": torch.ones(2, 2)}, "m": saved}, {"p": best, "m": live})
    assert_same(live.weight, saved.weight)
    assert torch.equal(best["best"], torch.ones(2, 2))


def test_old_names_that_torch_itself_converts_are_converted(tmp_path):
    with pytest.warns(FutureWarning):
        saved = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    live = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    keep({"m": saved}, tmp_path / "slot")
    bring_back({"m": live}, tmp_path / "slot")
    assert torch.equal(live[0].weight, saved[0].weight)


@pytest.mark.parametrize("direct", [True, False])
def test_an_error_in_load_state_dict_names_the_module_and_the_fix(tmp_path, direct):
    class Refusing(nn.Linear):
        def _load_from_state_dict(self, *_):
            raise KeyError("scale")

    keep({"m": nn.Linear(2, 2)}, tmp_path / "slot")
    with pytest.raises(keepstep.MismatchError, match=r"m: its load_state_dict\(\) refuses .*scale"):
        bring_back({"m": Refusing(2, 2)}, tmp_path / "slot", direct=direct)


class OnlyExtra(nn.Module):
    n = 0

    def get_extra_state(self):
        return {"n": self.n}

    def set_extra_state(self, state):
        self.n = state["n"]


@pytest.mark.parametrize("make", [nn.Identity, OnlyExtra, lambda: nn.Sequential(OnlyExtra())])
def test_a_module_without_tensors_is_restored(again, make):
    saved, live = make(), make()
    for module in saved.modules():
        module.n = 5
    again({"m": saved}, {"m": live})
    assert all(module.n == 5 for module in live.modules() if isinstance(module, OnlyExtra))


# --- names and keys ------------------------------------------------------------------------------


RANKED = ["w", "w@rank-00000", "w@rank-00001", "w~", "w@rank-00000~", "w@rank-00000@rank-00000"]


def test_user_keys_that_look_like_rank_suffixes_are_restored_unchanged(again):
    saved = {key: torch.full((2,), float(at)) for at, key in enumerate(RANKED)}
    live = again({"p": saved}, {"p": {key: torch.zeros(2) for key in reversed(RANKED)}})["p"]
    fresh = again({"p": saved}, {"p": {}})["p"]
    for key, value in saved.items():
        assert_same(live[key], value)
        assert_same(fresh[key], value)


def test_components_whose_dotted_names_collide_are_restored_separately(again):
    saved = {"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "a.b": nn.Linear(2, 2)}
    live = {"a.b": nn.Linear(2, 2), "a": nn.ModuleDict({"b": nn.Linear(2, 2)})}
    again(saved, live)
    assert_same(live["a.b"].weight, saved["a.b"].weight)
    assert_same(live["a"]["b"].weight, saved["a"]["b"].weight)


# --- optimizers ----------------------------------------------------------------------------------


def assert_tree(first, other):
    assert type(first) is type(other)
    if isinstance(first, torch.Tensor):
        assert_same(first, other)
    elif isinstance(first, dict):
        assert list(first) == list(other)
        for key, value in first.items():
            assert_tree(value, other[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(other)
        for left, right in zip(first, other, strict=True):
            assert_tree(left, right)
    else:
        assert first == other


def two_weights():
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})


def stepped(model, order, optimizer=torch.optim.AdamW, **options):
    made = optimizer([model[name].weight for name in order], lr=1e-2, **options)
    for number, name in enumerate("ab"):
        model[name].weight.grad = torch.full_like(model[name].weight, 10.0**number)
    made.step(*([lambda: torch.tensor(1.0)] if optimizer is torch.optim.LBFGS else []))
    return made


def test_flat_optimizer_state_is_restored_without_reordering(again):
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
    by_weight = {id(group["params"][0]): group["lr"] for group in live.param_groups}
    assert by_weight == {id(other["a"].weight): 0.1, id(other["b"].weight): 0.2}
    assert live.state_dict() == saved.state_dict()
    assert "have the order of the save" in caplog.text


def test_parameters_of_another_shape_are_refused_by_name_and_nothing_is_changed(again):
    def bare(*shapes):
        made = torch.optim.Adam([nn.Parameter(torch.ones(shape)) for shape in shapes])
        for param in made.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
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
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    rows = [{"params": [model[name].weight for name in group]} for group in groups]
    return {"m": model, "o": torch.optim.SGD(rows, lr=0.1)}


@pytest.mark.parametrize("groups", [["a"], ["ab", "c"], ["ab"]])
def test_groups_of_other_parameters_are_refused(again, groups):
    with pytest.raises(keepstep.MismatchError, match=r"o: (has the parameter|parameter groups of)"):
        again(optimized(["ac", "b"]), optimized(groups))


def test_parameter_names_in_optimizer_groups_match_those_of_load_state_dict(again):
    def made(prefix):
        model = nn.Linear(2, 2)
        named = [(f"{prefix}{name}", parameter) for name, parameter in model.named_parameters()]
        return {"m": model, "o": torch.optim.SGD(named if prefix else model.parameters(), lr=0.1)}

    for there, here in (("a", "b"), ("a", ""), ("", "b")):
        saved, live = made(there), made(here)
        control = made(here)["o"]
        control.load_state_dict(saved["o"].state_dict())
        again(saved, live)
        groups = live["o"].state_dict()["param_groups"]
        assert groups == control.state_dict()["param_groups"]
