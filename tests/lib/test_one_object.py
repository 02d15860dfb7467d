"""What is one object before a save is one object afterwards, as after `torch.load`."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep.errors import UsageError
from tests.lib.lives import bring_back, keep


@pytest.fixture(params=["own image", "another world"])
def again(request, tmp_path):
    """Saves the components of one life and restores them into those of the next."""

    def move(saved, live):
        keep(saved, tmp_path / "slot")
        bring_back(live, tmp_path / "slot", direct=request.param == "own image")
        return live

    return move


@dataclasses.dataclass
class Best:
    loss: float = 0.0
    weights: Any = None


@pytest.mark.parametrize(
    "make",
    [
        list,
        dict,
        set,
        deque,
        Counter,
        OrderedDict,
        bytearray,
        lambda: defaultdict(list),
        lambda: Best(),
        lambda: types.SimpleNamespace(a=1),
        lambda: argparse.Namespace(a=1),
        lambda: np.arange(3.0),
        lambda: np.zeros(40_000),
        lambda: torch.zeros(3),
        lambda: torch.Generator(),
        lambda: np.random.default_rng(1),
        lambda: random.Random(1),
        lambda: [torch.zeros(2)],
        lambda: {"t": torch.zeros(2)},
        lambda: deque([torch.zeros(20_000)]),
        lambda: OrderedDict(t=torch.zeros(2)),
        lambda: Best(1.0, torch.zeros(2)),
        lambda: types.SimpleNamespace(t=torch.zeros(2)),
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_mutable_object_shared_by_several_components_is_restored_as_one_object(
    again, make, fresh
):
    thing = make()
    saved = {"a": {"x": thing, "deep": [(thing, 1)]}, "b": {"y": thing}}
    live: dict[str, Any] = {"a": {}, "b": {}}
    if not fresh:
        live = {"a": {"x": make(), "deep": [(make(), 2)]}, "b": {"y": make()}}
    again(saved, live)
    assert type(live["a"]["x"]) is type(thing)
    assert live["a"]["x"] is live["a"]["deep"][0][0]
    assert live["a"]["x"] is live["b"]["y"]


def test_shared_objects_are_restored_when_components_are_given_in_another_order(again):
    part = {"t": torch.ones(2)}
    live: dict[str, Any] = {"b": {}, "a": {}}
    again({"a": {"x": part}, "b": {"x": part}}, live)
    assert live["a"]["x"] is live["b"]["x"]


def test_an_object_shared_only_before_the_restore_is_split_if_two_objects_were_saved(again):
    both: dict[str, Any] = {"n": 0}
    live = {"p": {"a": both, "b": both}}
    again({"p": {"a": {"n": 1}, "b": {"n": 2}}}, live)
    assert live["p"] == {"a": {"n": 1}, "b": {"n": 2}}
    assert live["p"]["a"] is both


def test_an_existing_object_is_refilled_and_shared_by_all_references(again):
    mine: dict[str, Any] = {"n": 0}
    part = {"n": 3}
    live: dict[str, Any] = {"p": {"b": mine}}
    again({"p": {"a": [part], "b": part}}, live)
    assert live["p"]["a"][0] is mine
    assert mine == {"n": 3}


class Attributes(dict):  # type: ignore[type-arg]
    pass


def test_a_dict_of_tensors_of_an_unknown_kind_is_refused_by_name(again):
    with pytest.raises(
        UsageError, match=r"p\.a: a .*Attributes of tensors would come back as a pl"
    ):
        again({"p": {"a": Attributes(t=torch.ones(1))}}, {"p": {}})
    live = Attributes()
    again({"p": Attributes(t=torch.ones(1))}, {"p": live})
    assert live["t"].item() == 1


# --- generators -------------------------------------------------------------------------------


def advanced(make):
    made = make()
    draw(made)
    return made


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1)]
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(3).tolist()
    return [generator.standard_normal(), *generator.permutation(5).tolist()]


GENERATORS = [
    lambda: torch.Generator().manual_seed(3),
    lambda: np.random.default_rng(3),
    lambda: np.random.RandomState(3),
    lambda: np.random.Generator(np.random.Philox(3)),
    lambda: np.random.Generator(np.random.MT19937(3)),
    lambda: np.random.SFC64(3),
    lambda: random.Random(3),
]


@pytest.mark.parametrize("make", GENERATORS)
@pytest.mark.parametrize("place", ["component", "dict", "list", "field", "tuple"])
def test_a_random_generator_is_restored_in_place(again, make, place):
    places = {
        "component": lambda generator: generator,
        "dict": lambda generator: {"g": generator},
        "list": lambda generator: {"g": [0, generator]},
        "field": lambda generator: {"g": Best(0.0, generator)},
        "tuple": lambda generator: {"g": (generator, 1)},
    }
    saved, mine = advanced(make), make()
    again({"g": places[place](saved)}, {"g": places[place](mine)})
    assert draw(mine) == draw(saved)


@pytest.mark.parametrize("make", GENERATORS)
def test_a_missing_random_generator_is_created_by_the_restore(again, make):
    saved, live = advanced(make), {"g": {"g": None}}
    again({"g": {"g": saved}}, live)
    assert type(live["g"]["g"]) is type(saved)
    assert draw(live["g"]["g"]) == draw(saved)


def test_a_random_generator_of_another_kind_is_refused_by_name(again):
    from keepstep.errors import MismatchError

    with pytest.raises(MismatchError, match=r"g: a random.Random in the checkpoint, a torch"):
        again({"g": random.Random(1)}, {"g": torch.Generator()})


class OwnRandom(random.Random):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (random.SystemRandom(), "SystemRandom"),
        (OwnRandom(1), "OwnRandom"),
    ],
)
def test_a_python_generator_without_restorable_state_is_refused_by_name(again, value, message):
    with pytest.raises(UsageError, match=message) as raised:
        again({"p": {"g": value}}, {"p": {}})
    assert "trusted=True" not in str(raised.value)


# --- views ------------------------------------------------------------------------------------


def share(first, other):
    return first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


VIEWS = {
    "row": lambda: (base := torch.arange(12.0).view(3, 4), base[1]),
    "view first": lambda: ((base := torch.arange(12.0).view(3, 4))[1], base),
    "transposed": lambda: (base := torch.arange(12.0).view(3, 4), base.t()),
    "another dtype": lambda: (base := torch.arange(4.0).double(), base.view(torch.int32)),
    "complex": lambda: (base := torch.randn(4, dtype=torch.complex64), torch.view_as_real(base)),
    "overlapping parts": lambda: ((base := torch.arange(12.0))[:8], base[4:]),
    "columns": lambda: ((base := torch.arange(12.0).view(3, 4))[:, :3], base[:, 2:]),
    "of views": lambda: (base := torch.arange(12.0), (rows := base.view(3, 4)), rows[1:], rows[1]),
    "windows": lambda: (base := torch.arange(9.0), base.unfold(0, 3, 1)),
    "flipped parts": lambda: ((base := torch.arange(12.0))[4:], base[:8]),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("live", ["none", "the same", "apart"])
@pytest.mark.parametrize("where", ["list", "dicts", "foreign"])
def test_tensors_that_share_memory_share_it_after_a_restore(again, kind, live, where):
    saved = list(VIEWS[kind]())
    saved[0].add_(1)
    expected = [tensor.clone() for tensor in saved]
    here = list(VIEWS[kind]()) if live == "the same" else [tensor.clone() for tensor in saved]

    def components(tensors):
        if where == "list":
            return {"p": {"all": tensors}}
        if where == "foreign":
            return {"p": {"first": tensors[0]}, "q": Holder(tensors[1:])}
        return {"p": {"first": tensors[0]}, "q": {"rest": tensors[1:]}}

    target = components([] if live == "none" and where == "list" else here)
    if live == "none" and where != "list":
        target["p"].clear()
    again(components(saved), target)
    rest = target["q"].rest if where == "foreign" else target.get("q", {}).get("rest", [])
    got = target["p"]["all"] if where == "list" else [target["p"]["first"], *rest]
    for value, expected_value, before in zip(got, expected, saved, strict=True):
        assert torch.equal(value, expected_value)
        assert value.stride() == before.stride()
    assert all(share(got[0], value) for value in got[1:])
    saved[0].zero_()
    got[0].zero_()
    for value, expected_value in zip(got, saved, strict=True):
        assert torch.equal(value, expected_value)


class Holder:
    def __init__(self, rest):
        self.rest = rest

    def state_dict(self):
        return {"rest": self.rest}

    def load_state_dict(self, state):
        self.rest = state["rest"]


def test_parts_that_do_not_overlap_are_kept_as_they_are(again, tmp_path):
    whole = torch.arange(1000.0)
    again({"p": {"a": whole[:10], "b": whole[500:510]}}, {"p": (live := {})})
    assert live["a"].untyped_storage().nbytes() == 40
    assert not share(live["a"], live["b"])


def test_a_saved_view_of_a_weight_is_restored_as_a_view_of_the_weight(again):
    theirs, mine = nn.Linear(3, 2), nn.Linear(3, 2)
    live = {"model": mine, "p": {"row": torch.zeros(3), "all": None}}
    again(
        {"model": theirs, "p": {"row": theirs.weight.detach()[1], "all": theirs.weight.detach()}},
        live,
    )
    assert torch.equal(mine.weight, theirs.weight)
    assert live["p"]["row"].data_ptr() == mine.weight[1].data_ptr()
    assert live["p"]["all"].data_ptr() == mine.weight.data_ptr()


def test_restoring_an_independent_tensor_over_a_view_does_not_overwrite_the_weight(again):
    """A live view of a weight, where another tensor was saved, must not be filled in place."""
    theirs, mine = nn.Linear(3, 2), nn.Linear(3, 2)
    live = {"model": mine, "p": {"row": mine.weight.detach()[0]}}
    again({"model": theirs, "p": {"row": torch.full((3,), 7.0)}}, live)
    assert torch.equal(mine.weight, theirs.weight)
    assert live["p"]["row"].tolist() == [7, 7, 7]


def test_saved_copies_of_weights_are_restored_as_copies_even_if_they_alias_the_weights(again):
    """The script begins with the very weights; the run had a copy of them, equal at that step."""
    theirs, mine = nn.Linear(2, 2), nn.Linear(2, 2)
    live = {"model": mine, "p": {"best": mine.state_dict()}}
    again({"model": theirs, "p": {"best": copy.deepcopy(theirs.state_dict())}}, live)
    best = live["p"]["best"]["weight"]
    assert torch.equal(best, theirs.weight)
    assert best.data_ptr() != mine.weight.data_ptr()
