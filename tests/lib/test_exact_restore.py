"""A restore is the state that was saved: the same keys, kinds, bytes and strides, and no others."""

from __future__ import annotations

import copy
import gc
from collections import Counter, deque
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


def test_a_key_that_was_removed_before_the_save_stays_removed(again, caplog):
    todo = {number: f"shard{number}" for number in range(5)}
    live = again(
        {"p": {"todo": {3: todo[3], 4: todo[4]}, "phase": "training"}},
        {"p": {"warm": 1, "todo": dict(todo), "phase": "warmup"}},
    )["p"]
    assert live == {"todo": {3: "shard3", 4: "shard4"}, "phase": "training"}
    (told,) = (one.getMessage() for one in caplog.records if "removed here" in one.getMessage())
    assert told.startswith("keepstep: p: 'warm': not in the restored step")


def test_the_order_of_keys_comes_back(again):
    live = again(
        {"p": {"b": 1, "t": torch.ones(2), "d": {"y": 1, "x": 2}, "a": 3}},
        {"p": {"a": 0, "d": {"x": 0, "y": 0}, "t": torch.zeros(2), "b": 0}},
    )["p"]
    assert list(live) == ["b", "t", "d", "a"]
    assert list(live["d"]) == ["y", "x"]


def test_a_tensor_of_a_dict_that_grew_or_changed_its_dtype_comes_back(again):
    saved = {"losses": torch.arange(3.0), "n": torch.tensor([2.5]), "q": torch.ones(2, 2)}
    live = {"losses": torch.zeros(0), "n": torch.tensor([0]), "q": torch.zeros(2, 2)}
    same = live["q"]
    again({"p": dict(saved)}, {"p": live})
    for name, tensor in saved.items():
        assert_same(live[name], tensor)
    assert live["q"] is same


def test_dicts_and_lists_that_a_script_holds_see_what_was_restored(again):
    losses, inner, tensors, rows = [], {"deep": []}, [torch.zeros(2)], [[1, 2], {"x": 0}]
    deep, row, cell = inner["deep"], rows[0], rows[1]
    again(
        {"p": {
            "losses": [1.5, 2.5], "inner": {"deep": [7], "more": 1},
            "tensors": [torch.ones(2), torch.ones(3)], "rows": [[3], {"x": 1}, 5],
        }},
        {"p": {"inner": inner, "losses": losses, "tensors": tensors, "rows": rows}},
    )  # fmt: skip
    assert losses == [1.5, 2.5]
    assert inner == {"deep": [7], "more": 1}
    assert deep == [7]
    assert [one.tolist() for one in tensors] == [[1, 1], [1, 1, 1]]
    assert rows == [[3], {"x": 1}, 5]
    assert rows[0] is row
    assert rows[1] is cell


def test_a_counter_that_a_script_holds_counts_what_was_restored(again):
    live = {"c": Counter(x=5, z=1), "d": deque([1, 2], maxlen=3)}
    counter, last = live["c"], live["d"]
    again({"p": {"c": Counter(x=1, y=-2), "d": deque([3], maxlen=3)}}, {"p": live})
    assert counter == Counter(x=1, y=-2)
    assert live["c"] is counter
    assert live["d"] is last
    assert last == deque([3])


def test_one_list_in_two_places_gets_the_content_of_each(again):
    both = []
    live = again({"p": {"a": [1], "b": [2]}}, {"p": {"a": both, "b": both}})["p"]
    assert live == {"a": [1], "b": [2]}


def test_one_live_tensor_for_two_saved_ones_holds_none_of_them_back(again):
    both = torch.zeros(2)
    live = again(
        {"p": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}}, {"p": {"a": both, "b": both}}
    )["p"]
    assert live["a"].tolist() == [1, 1]
    assert live["b"].tolist() == [2, 2]


def test_tensors_that_were_one_are_one_again(again):
    both = torch.ones(2)
    live = again({"p": {"a": both, "b": both}}, {"p": {}})["p"]
    assert live["a"] is live["b"]


def test_names_with_dots_are_told_apart_whatever_their_order(again):
    live = {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}
    again({"p": {"a.b": torch.ones(1), "a": {"b": torch.full((1,), 2.0)}}}, {"p": live})
    assert live["a.b"].item() == 1
    assert live["a"]["b"].item() == 2


@pytest.mark.parametrize("direct", [True, False])
def test_a_tensor_that_a_failed_attempt_has_begun_may_give_way_to_a_new_one(tmp_path, direct):
    keep({"p": {"grown": torch.ones(3)}}, tmp_path / "slot")
    live = {"grown": torch.zeros(2), "gone": torch.zeros(2)}
    with PartialRestore() as torn:
        torn.begin(live.values())
        bring_back({"p": live}, tmp_path / "slot", direct=direct, partial=torn)
    assert list(live) == ["grown"]
    assert live["grown"].tolist() == [1, 1, 1]


# --- memory formats ------------------------------------------------------------------------------

STRIDES = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel": torch.ones(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "one pixel": torch.ones(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "one of all": torch.ones(1, 3, 1, 1).to(memory_format=torch.channels_last),
    "plain pixel": torch.ones(2, 3, 1, 1),
    "3d": torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "empty": torch.ones(0, 3).t(),
    "bytes": torch.ones(3, 4, dtype=torch.complex128).t(),
}


def test_a_new_tensor_has_the_strides_that_were_saved(again):
    live = again({"p": dict(STRIDES)}, {"p": {}})["p"]
    for name, tensor in STRIDES.items():
        assert_same(live[name], tensor)


def test_a_slice_of_a_much_larger_tensor_comes_back_dense_in_the_order_of_its_dimensions(again):
    sliced = torch.arange(40_000.0).view(400, 100).t()[::50]
    live = again({"p": {"s": sliced}}, {"p": {}})["p"]["s"]
    assert torch.equal(live, sliced)
    assert live.stride() == (1, 2)


def test_parameters_keep_their_memory_and_their_strides(again):
    def net():
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    live = net()
    address, strides = live.weight.data_ptr(), live.weight.stride()
    saved = net()
    again({"m": saved}, {"m": live})
    assert (live.weight.data_ptr(), live.weight.stride()) == (address, strides)
    assert_same(live.weight, saved.weight)


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


def test_a_module_whose_state_dict_makes_copies_is_given_them_back(again):
    saved, live = Doubled(), Doubled()
    bias = live.bias
    again({"m": saved}, {"m": live})
    assert torch.equal(live.weight, saved.weight * 2)
    assert torch.equal(live.bias, saved.bias)
    assert live.bias is bias


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


class Mirrored(nn.Module):
    """Code of its own runs when it is loaded, of the kind `how`, and notes what it finds."""

    def __init__(self, how="post hook"):
        super().__init__()
        self.how, self.seen, self.calls = how, None, 0
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(()))
        if how == "post hook":
            self.register_load_state_dict_post_hook(lambda module, _: module.note())
        elif how == "pre hook":
            self.register_load_state_dict_pre_hook(
                lambda module, state, prefix, *_: module.note(state[f"{prefix}count"])
            )

    def note(self, count=None):
        self.calls += 1
        self.seen = float(self.count if count is None else count), self.weight.tolist()

    def _load_from_state_dict(self, state, prefix, *rest):
        before = float(self.count)
        super()._load_from_state_dict(state, prefix, *rest)
        if self.how == "from state dict":
            self.note()
            self.seen = before, *self.seen


class MirroredAbove(nn.Sequential):
    """Overrides the whole load_state_dict."""

    def load_state_dict(self, state, *args, **kwargs):
        result = super().load_state_dict(state, *args, **kwargs)
        self[0].note()
        return result


def mirrored(how):
    first = Mirrored(how)
    return (MirroredAbove if how == "above" else nn.Sequential)(first, nn.Linear(3, 3))


def trained_for(model, count):
    model[0].count.fill_(count)
    return model


@pytest.mark.parametrize("how", ["post hook", "pre hook", "from state dict", "above"])
def test_what_a_module_does_when_it_is_loaded_happens_once_and_as_after_torch_load(again, how):
    saved, live, control = trained_for(mirrored(how), 7.0), mirrored(how), mirrored(how)
    control.load_state_dict(live.state_dict())
    control[0].calls = 0
    address, untouched = live[0].weight.data_ptr(), live[1].weight.data_ptr()
    again({"m": saved}, {"m": live})
    control.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert (live[0].seen, live[0].calls) == (control[0].seen, 1)
    assert (live[0].weight.data_ptr(), live[1].weight.data_ptr()) == (address, untouched)
    for key, value in control.state_dict().items():
        assert_same(live.state_dict()[key], value)


class Observer(nn.Module):
    """Its buffers get their shape from the first batch, and are loaded so."""

    def __init__(self, size=0):
        super().__init__()
        self.register_buffer("low", torch.arange(float(size)))
        self.register_buffer("maybe", None)
        self.rows = []

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}rows"] = list(self.rows)

    def _load_from_state_dict(self, state, prefix, *rest):
        self.low = torch.empty_like(state[f"{prefix}low"])
        if f"{prefix}maybe" in state:
            self.maybe = torch.empty_like(state[f"{prefix}maybe"])
        self.rows = state.pop(f"{prefix}rows")
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("back", [False, True])
def test_buffers_and_lists_that_get_their_shape_while_training_are_loaded_by_their_module(
    again, back
):
    grown, fresh = (nn.Sequential(Observer(size), nn.Linear(2, 2)) for size in (5, 0))
    grown[0].maybe, grown[0].rows = torch.ones(2), [torch.ones(1), torch.zeros(2)]
    saved, live = (fresh, grown) if back else (grown, fresh)
    if back:
        live[0].maybe = None
    again({"m": saved}, {"m": live})
    assert_tree(dict(live.state_dict()), dict(saved.state_dict()))


class Versioned(nn.Module):
    _version = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.loaded = None

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        state._metadata[prefix[:-1]]["scale"] = 2.5

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        self.loaded = dict(metadata)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Newer(Versioned):
    _version = 4


def test_a_module_is_loaded_with_the_metadata_that_was_saved(again):
    live = again({"m": nn.Sequential(Versioned())}, {"m": nn.Sequential(Newer())})["m"]
    assert live[0].loaded == {"version": 3, "scale": 2.5}


def test_a_whole_model_is_loaded_as_one_whose_class_got_its_own_loading_later(again):
    saved = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))

    class Later(nn.Sequential):
        def load_state_dict(self, state, *args, **kwargs):
            self.metadata = dict(state._metadata)
            return super().load_state_dict(state, *args, **kwargs)

    live = again({"m": saved}, {"m": Later(nn.BatchNorm1d(2), nn.Linear(2, 2))})["m"]
    assert live.metadata == dict(saved.state_dict()._metadata)


def test_old_names_that_torch_itself_converts_are_converted(tmp_path):
    with pytest.warns(FutureWarning):
        saved = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    live = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    keep({"m": saved}, tmp_path / "slot")
    bring_back({"m": live}, tmp_path / "slot")
    assert torch.equal(live[0].weight, saved[0].weight)


@pytest.mark.parametrize("direct", [True, False])
def test_what_a_module_refuses_names_it_and_says_what_to_do(tmp_path, direct):
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
    for one in saved.modules():
        one.n = 5
    again({"m": saved}, {"m": live})
    assert all(one.n == 5 for one in live.modules() if isinstance(one, OnlyExtra))


# --- names and keys ------------------------------------------------------------------------------

RANKED = ["w", "w@rank-00000", "w@rank-00001", "w~", "w@rank-00000~", "w@rank-00000@rank-00000"]


def test_keys_that_look_like_a_ranks_copy_are_only_keys(again):
    saved = {key: torch.full((2,), float(at)) for at, key in enumerate(RANKED)}
    live = again({"p": saved}, {"p": {key: torch.zeros(2) for key in reversed(RANKED)}})["p"]
    fresh = again({"p": saved}, {"p": {}})["p"]
    for key, value in saved.items():
        assert_same(live[key], value)
        assert_same(fresh[key], value)


def test_parameters_whose_names_look_like_a_ranks_copy_are_only_parameters(again):
    def made(scale):
        weights = {key: nn.Parameter(torch.full((2,), scale * at)) for at, key in enumerate(RANKED)}
        model = nn.Module()
        for key, weight in weights.items():
            model.register_parameter(key, weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if scale:
            for at, weight in enumerate(weights.values()):
                weight.grad = torch.full((2,), 10.0 + at)
            optimizer.step()
        return {"m": model, "o": optimizer}

    saved = made(1.0)
    live = again(saved, made(0.0))
    assert_tree(dict(live["m"].state_dict()), dict(saved["m"].state_dict()))
    assert_tree(live["o"].state_dict()["state"], saved["o"].state_dict()["state"])


def test_components_whose_names_run_into_each_other_are_told_apart(again):
    saved = {"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "a.b": nn.Linear(2, 2)}
    live = {"a.b": nn.Linear(2, 2), "a": nn.ModuleDict({"b": nn.Linear(2, 2)})}
    again(saved, live)
    assert_same(live["a.b"].weight, saved["a.b"].weight)
    assert_same(live["a"]["b"].weight, saved["a"]["b"].weight)


KEYS = [0.5, -0.0, 1e300, (0, "a"), (1, (2.5, None)), None, True, b"x", Path("a/b"), 2**70, 1j]


def test_any_data_is_a_key_beside_tensors(again):
    saved = {key: torch.full((2,), float(at)) for at, key in enumerate(KEYS)}
    saved |= {"deep": {(1, 2): [torch.ones(1), {frozenset({1}): torch.zeros(1)}]}}
    live = again({"p": saved}, {"p": {0.5: torch.zeros(2), "deep": {(1, 2): [torch.zeros(1)]}}})[
        "p"
    ]
    assert_tree(live, saved)
    assert [type(key) for key in live] == [type(key) for key in saved]


def test_optimizer_state_has_keys_of_any_data(again):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saved, live = Keeping(model.parameters()), Keeping(other.parameters())
    for one in model.parameters():
        saved.state[one] = {0.0: torch.ones_like(one), 0.9: torch.zeros_like(one), "step": 3}
    saved.state[(0, 1)] = {"slow": torch.ones(2)}
    saved.state[0.5] = {"odd": torch.ones(1)}
    again({"m": model, "o": saved}, {"m": other, "o": live})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_tree(live.state[two], saved.state[one])
    assert_tree(live.state[(0, 1)], saved.state[(0, 1)])
    assert_tree(live.state[0.5], saved.state[0.5])


# --- optimizers ----------------------------------------------------------------------------------


class Keeping(torch.optim.Optimizer):
    """Its state is what a test puts there."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        """Nothing."""


def trained(steps=2, seed=0, optimizer=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    model.to(memory_format=torch.channels_last)
    optimizer = optimizer(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    return {"m": model, "o": optimizer}


def test_optimizer_state_has_the_keys_in_order_and_the_strides_that_were_saved(again):
    saved = trained()
    live = again(saved, trained(steps=0, seed=1))
    weight = saved["m"][0].weight
    assert not weight.is_contiguous()
    for one, two in zip(saved["m"].parameters(), live["m"].parameters(), strict=True):
        state = saved["o"].state[one]
        assert list(live["o"].state[two]) == list(state)
        for key, value in state.items():
            assert_same(live["o"].state[two][key], value)


def nested(parameter):
    return {
        "z": {"master": parameter.float() + 1e-4, "count": torch.zeros((), dtype=torch.int64)},
        "pair": [torch.full((2,), 1e-9), (torch.arange(3, dtype=torch.uint8), 1 + 1e-12)],
        "mode": "abc",
        "none": None,
        "a": torch.full((2,), 1.0 + 1e-12, dtype=torch.float64),
    }


@pytest.mark.parametrize("fresh", [True, False])
def test_optimizer_state_of_any_depth_keeps_its_kinds(again, fresh):
    model = nn.Linear(4, 4).to(torch.bfloat16)
    other = copy.deepcopy(model)
    saved, live = Keeping(model.parameters()), Keeping(other.parameters())
    for parameter in model.parameters():
        saved.state[parameter] = nested(parameter)
    if not fresh:
        for parameter in other.parameters():
            live.state[parameter] = {"a": torch.zeros(1), "old": torch.zeros(1)}
    again({"m": model, "o": saved}, {"m": other, "o": live})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_tree(live.state[two], saved.state[one])


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


def test_optimizer_state_under_string_keys_comes_back(again):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saved, live = Keeping(model.parameters()), Keeping(other.parameters())
    saved.state["global"] = {"norm": torch.tensor(1.5), "step": 3, "by": {"x": torch.ones(2)}}
    saved.state[model.weight] = {"m": torch.ones(2, 2)}
    again({"m": model, "o": saved}, {"m": other, "o": live})
    assert_tree(live.state["global"], saved.state["global"])
    assert_tree(live.state[other.weight], saved.state[model.weight])


def two_weights(shape=(4, 4)):
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(*shape, bias=False)})


def stepped(model, order, optimizer=torch.optim.AdamW, **options):
    made = optimizer([model[name].weight for name in order], lr=1e-2, **options)
    for number, one in enumerate("ab"):
        model[one].weight.grad = torch.full_like(model[one].weight, 10.0**number)
    made.step(*([lambda: torch.tensor(1.0)] if optimizer is torch.optim.LBFGS else []))
    return made


@pytest.mark.parametrize("shape", [(4, 4), (4, 8)])
def test_optimizer_state_finds_its_parameter_whatever_the_order(again, shape):
    model, other = two_weights(shape), two_weights(shape)
    saved = stepped(model, "ab")
    live = torch.optim.AdamW([other["b"].weight, other["a"].weight], lr=1.0)
    again({"m": model, "o": saved}, {"m": other, "o": live})
    for name in "ab":
        assert_tree(live.state[other[name].weight], saved.state[model[name].weight])
    assert live.param_groups[0]["lr"] == 1e-2
    assert live.state_dict()["param_groups"] == saved.state_dict()["param_groups"]


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


def test_a_parameter_that_this_optimizer_lacks_is_named(tmp_path):
    keep(optimized(["ac", "b"]), tmp_path / "slot")
    with pytest.raises(keepstep.MismatchError, match=r"has the parameter m\.c\.weight in the"):
        bring_back(optimized(["b", "a"]), tmp_path / "slot")


def test_a_rate_that_is_a_tensor_stays_one_for_all_groups(again):
    def two(rate):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": one.parameters()} for one in model]
        return {"m": model, "o": torch.optim.Adam(groups, lr=torch.tensor(rate))}

    live = again(two(0.25), two(0.5))["o"]
    assert [group["lr"].item() for group in live.param_groups] == [0.25, 0.25]
    assert live.param_groups[0]["lr"] is live.param_groups[1]["lr"]


class OfItsOwn(torch.optim.SGD):
    """An optimizer whose state_dict is not made as torch makes them."""

    def state_dict(self):
        return {"base": super().state_dict(), "slow": torch.ones(2)}

    def load_state_dict(self, state):
        super().load_state_dict(state["base"])
        self.slow = state["slow"]


def test_an_optimizer_with_a_state_dict_of_its_own_gets_it_back(again):
    def made(rate):
        model = nn.Linear(2, 2)
        return {"m": model, "o": OfItsOwn(model.parameters(), lr=rate)}

    live = again(made(0.25), made(0.5))["o"]
    assert live.param_groups[0]["lr"] == 0.25
    assert live.slow.tolist() == [1, 1]


class Counting(torch.optim.SGD):
    """Its state_dict has more than torch's, in the form `how`."""

    def __init__(self, parameters, how="lenient", **options):
        super().__init__(parameters, lr=0.1, momentum=0.9, **options)
        self.how, self.counter, self.mean = how, 0, torch.zeros(3)
        if how == "hooks":
            self.register_state_dict_post_hook(lambda one, tree: {"extra": one.extra(), **tree})
            self.register_load_state_dict_pre_hook(lambda one, tree: one.put(tree["extra"]))

    def extra(self):
        return {"counter": self.counter, "mean": self.mean, (0, 1): [torch.ones(1) * self.counter]}

    def put(self, extra):
        assert extra["mean"] is not self.mean
        self.counter, self.mean, self.rows = extra["counter"], extra["mean"], extra[(0, 1)]

    def state_dict(self):
        tree = super().state_dict()
        return tree if self.how == "hooks" else {**tree, **self.extra()}

    def load_state_dict(self, tree):
        if self.how != "hooks":
            self.put(tree)
        super().load_state_dict(tree)


@pytest.mark.parametrize("how", ["strict", "hooks"])
def test_what_an_optimizer_adds_to_its_state_dict_comes_back(again, how):
    def made(count):
        model = nn.Linear(2, 2)
        optimizer = Counting(model.parameters(), how)
        for _ in range(count):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        optimizer.counter, optimizer.mean = count, torch.full((3,), float(count))
        return {"m": model, "o": optimizer}

    saved = made(2)
    live = again(saved, made(0))["o"]
    assert (live.counter, live.mean.tolist(), live.rows[0].item()) == (2, [2.0] * 3, 2.0)
    assert_tree(live.state_dict(), saved["o"].state_dict())


class Deriving(torch.optim.SGD):
    """What it derives when it is loaded stays; what torch only casts comes back exactly."""

    def load_state_dict(self, tree):
        super().load_state_dict(tree)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"] * 2
            state["mode"], state["count"] = "loaded", state["count"] + 1


def test_what_an_optimizer_derives_from_its_state_stays(again):
    model, other = (nn.Linear(2, 2).to(torch.bfloat16) for _ in range(2))
    saved, live = (Deriving(one.parameters(), lr=0.1, momentum=0.9) for one in (model, other))
    exact = torch.full((2, 2), 1 + 2**-20)
    for one in model.parameters():
        saved.state[one] = {
            "momentum_buffer": torch.ones_like(one), "exact": exact, "mode": "new", "count": 1,
            "text": "kept", "nan": torch.tensor([float("nan"), 1 + 2**-20]),
        }  # fmt: skip
    again({"m": model, "o": saved}, {"m": other, "o": live})
    for one in other.parameters():
        state = live.state[one]
        assert torch.equal(state["momentum_buffer"], torch.full_like(one, 2.0))
        assert (state["mode"], state["count"], state["text"]) == ("loaded", 2, "kept")
        assert_same(state["exact"], exact)
        assert state["nan"].dtype == torch.float32
        assert state["nan"][1].item() == 1 + 2**-20


def test_names_of_parameters_in_the_groups_come_back_as_load_state_dict_brings_them(again):
    def made(prefix):
        model = nn.Linear(2, 2)
        named = [(f"{prefix}{name}", one) for name, one in model.named_parameters()]
        return {"m": model, "o": torch.optim.SGD(named if prefix else model.parameters(), lr=0.1)}

    for there, here in (("a", "b"), ("a", ""), ("", "b")):
        saved, live = made(there), made(here)
        control = made(here)["o"]
        control.load_state_dict(saved["o"].state_dict())
        again(saved, live)
        groups = live["o"].state_dict()["param_groups"]
        assert groups == control.state_dict()["param_groups"]
