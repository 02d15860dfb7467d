"""What goes in comes out: random trees of all that may be kept, restored into another script.

Equal values, kinds, dtypes, strides and order; and dicts, lists and tensors that both have are the
very ones that the script made.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections import OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from keepstep.state.taken_state import CODE_OF
from tests.image.strategies import states
from tests.lib.lives import bring_back, keep

DTYPES = sorted(CODE_OF, key=str)
EXAMPLES = settings(max_examples=int(os.environ.get("KEEPSTEP_EXAMPLES", "30")))


def filled(shape, dtype, seed):
    """Random bytes of that dtype; truth values for bool."""
    count = torch.Size(shape).numel() * dtype.itemsize
    chance = torch.Generator().manual_seed(seed)
    limit = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, limit, (count,), dtype=torch.uint8, generator=chance)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw):
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    kind = draw(st.sampled_from(["plain", "permuted", "sliced", "conjugate"]))
    if kind == "sliced":
        wide = filled([2 * size for size in shape], dtype, seed)
        return wide[tuple(slice(None, None, 2) for _ in shape)]
    tensor = filled(shape, dtype, seed)
    if kind == "permuted":
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    return tensor.conj() if kind == "conjugate" and dtype.is_complex else tensor


@st.composite
def arrays(draw):
    """Some of them large enough to be entries of the image."""
    code = draw(st.sampled_from(["<f8", ">i4", "<c8", "|b1", "<M8[s]", "<U3", "|S5", "<u2"]))
    rows = draw(st.sampled_from([0, 3, 9000]))
    data = np.arange(rows * 4 * np.dtype(code).itemsize, dtype=np.uint8) % 2
    array = data.view(code).reshape(rows, 4) if rows else np.empty((0, 4), code)
    return draw(st.sampled_from([array, np.asfortranarray(array), array[::2], array.T]))


keys = st.text(max_size=3) | st.integers(-2, 9)
trees = st.recursive(
    tensors() | arrays() | states,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=5),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda entries: defaultdict(list, entries)),
        st.lists(arrays(), max_size=2).map(lambda items: deque(items, maxlen=3)),
    ),
    max_leaves=12,
)
components = st.dictionaries(keys, trees, max_size=6)


def altered(chance, value, *, named=True):
    """What another script may have where this one has `value`. `named`: tensors may be there."""
    if type(value) is dict:
        named = named and all(type(key) in (str, int) for key in value)
        rows = [
            (key, altered(chance, value, named=named))
            for key, value in value.items()
            if chance.random() < 0.8
        ]
        chance.shuffle(rows)
        return dict(rows) | ({"new": torch.zeros(2)} if named and chance.random() < 0.3 else {})
    if type(value) is list:
        rows = [altered(chance, item, named=named) for item in value]
        return rows[: chance.randrange(len(rows) + 1)] + [0] * chance.randrange(2)
    if type(value) is tuple:
        return tuple(altered(chance, item, named=named) for item in value)
    if isinstance(value, torch.Tensor):
        same = torch.empty_like(value.resolve_conj()).zero_()
        other = torch.zeros((*value.shape, 2), dtype=value.dtype)
        return chance.choice([same, same, other, torch.zeros(value.shape, dtype=torch.int16), None])
    return chance.choice([copy.deepcopy(value), None, 0, [], {}])


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1)).view(torch.uint8)


def text(value):
    """`repr`, and the same for two sets that were filled in another order."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(text, value))}"
    if type(value) is tuple:
        return f"({','.join(map(text, value))},)"
    return repr(value)


def is_dense(tensor):
    """Whether its elements fill their memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def wide(tensor):
    """Strides of the dimensions of more than one element: the others mean nothing."""
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def assert_same(saved, got, live=()):
    """`live`: ids of the tensors and dicts that the other script had; tensors keep their own
    strides, and a dict its own kind where a plain one was saved."""
    own_kind = type(saved) is dict and isinstance(got, dict) and id(got) in live
    assert type(saved) is type(got) or own_kind
    if isinstance(saved, torch.Tensor):
        assert (saved.dtype, saved.shape) == (got.dtype, got.shape)
        assert torch.equal(bits(saved), bits(got))
        if id(got) not in live and saved.numel() and is_dense(saved):
            assert wide(saved) == wide(got)
    elif isinstance(saved, np.ndarray):
        assert (saved.dtype, saved.shape) == (got.dtype, got.shape)
        assert saved.tobytes() == got.tobytes()
        fortran = saved.flags.f_contiguous and not saved.flags.c_contiguous
        assert got.flags.f_contiguous if fortran else got.flags.c_contiguous
    elif isinstance(saved, dict):
        assert [text(key) for key in saved] == [text(key) for key in got]
        factories = [getattr(mapping, "default_factory", 0) for mapping in (saved, got)]
        assert factories[0] is factories[1] or own_kind
        for value, two in zip(saved.values(), got.values(), strict=True):
            assert_same(value, two, live)
    elif isinstance(saved, list | tuple | deque):
        assert len(saved) == len(got)
        assert getattr(saved, "maxlen", 0) == getattr(got, "maxlen", 0)
        for first, two in zip(saved, got, strict=True):
            assert_same(first, two, live)
    else:
        assert text(saved) == text(got)


def held(value):
    """A tree of the objects themselves: what a script may hold in variables."""
    if type(value) is dict:
        return value, {key: held(value) for key, value in value.items()}
    if type(value) is list:
        return value, dict(enumerate(map(held, value)))
    return value, {}


def assert_held(before, saved, got):
    """What both had at one place is what the script made."""
    live, children = before
    if isinstance(live, torch.Tensor):
        if isinstance(saved, torch.Tensor) and (saved.shape, saved.dtype) == (
            live.shape,
            live.dtype,
        ):
            assert got is live
    elif type(live) is type(saved) and type(live) in (dict, list):
        assert got is live
        for key, child in children.items():
            # a NaN as a key is found as the same object only, and comes back as another one
            if key in saved and key in got if type(saved) is dict else key < len(saved):
                assert_held(child, saved[key], got[key])


def live_ids(value):
    """Of its tensors and dicts."""
    if isinstance(value, torch.Tensor | dict):
        yield id(value)
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from live_ids(item)


def restored(saved, live, direct):
    with tempfile.TemporaryDirectory() as directory:
        keep(saved, Path(directory) / "slot")
        bring_back(live, Path(directory) / "slot", direct=direct)


class Foreign:
    """Anything with the two methods."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("direct", [True, False], ids=["own image", "another world"])
@EXAMPLES
@given(components, trees, st.integers(0, 1 << 30), st.none() | components)
@example({"a": {}}, {}, 0, {"a": defaultdict(list)})
def test_random_trees_survive_a_save_and_restore(direct, saved, foreign, seed, other):
    live = altered(random.Random(seed), saved) if other is None else other
    before, ids, there = held(live), frozenset(live_ids(live)), Foreign({})
    restored({"p": saved, "f": Foreign({"s": foreign})}, {"p": live, "f": there}, direct)
    assert_same(saved, live, ids)
    assert_same({"s": foreign}, there.state)
    assert_held(before, saved, live)


class Keeping(torch.optim.Optimizer):
    """Its state is what a test puts there."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure=None):
        """Nothing."""


plain_trees = st.recursive(
    tensors() | states,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=6,
)


@st.composite
def optimized(draw):
    """Shapes of parameters by name, the groups that they are in, and the state of each."""
    shapes = st.lists(st.integers(1, 3), max_size=2)
    names = draw(st.dictionaries(st.sampled_from("abcdef"), shapes, min_size=1))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    order = draw(st.permutations(sorted(names)))
    cut = draw(st.integers(0, len(order) - 1))
    groups = [group for group in (order[:cut], order[cut:]) if group]
    some = st.dictionaries(keys, plain_trees, max_size=3)
    state = {name: draw(some) for name in draw(st.permutations(order)) if draw(st.booleans())}
    return names, dtype, groups, state, {"global": draw(some)} if draw(st.booleans()) else {}


def made(names, dtype, groups):
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in names.items()}
    )
    rows = [{"params": [model[name] for name in group]} for group in groups]
    return {"m": model, "o": Keeping(rows)}


@pytest.mark.parametrize("direct", [True, False], ids=["own image", "another world"])
@EXAMPLES
@given(optimized(), st.integers(0, 1 << 30), st.booleans())
def test_random_optimizers_survive_a_save_and_restore(direct, drawn, seed, used):
    names, dtype, groups, state, other = drawn
    saved = made(names, dtype, groups)
    for number, group in enumerate(saved["o"].param_groups):
        group["lr"] = number + 0.5
    for name, value in state.items():
        saved["o"].state[saved["m"][name]] = value
    saved["o"].state.update(other)
    chance = random.Random(seed)
    turned = [chance.sample(group, len(group)) for group in chance.sample(groups, len(groups))]
    live = made(names, dtype, turned)
    ids = set()
    for name, first in state.items() if used else ():
        mine = altered(chance, first)
        live["o"].state[live["m"][name]] = mine
        ids.update(live_ids(mine))
    restored(saved, live, direct)
    for name, parameter in live["m"].items():
        assert_same(saved["m"][name].detach(), parameter.detach())
        if name in state:
            assert_same(state[name], live["o"].state[parameter], ids)
        else:
            assert not live["o"].state.get(parameter)
    assert_same(other, {key: value for key, value in live["o"].state.items() if key == "global"})
    assert live["o"].state_dict()["param_groups"] == saved["o"].state_dict()["param_groups"]
