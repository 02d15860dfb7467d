"""A state is taken again beside how it was taken before: whatever changed, the result is that of a
walk; where nothing moved, the tensors are those of before.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from keepstep.errors import UsageError
from keepstep.state.capture import capture_state, recapture_state
from keepstep.state.sharding import ALONE
from keepstep.state.taken_state import snapshot_tensor_metadata


class Silent(nn.Linear):
    """A layer that keeps nothing."""

    def _save_to_state_dict(self, *_: object) -> None:
        pass


class State:
    """What a script hands over: a module, an optimizer, a dict of all kinds of things."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(
            [{"params": [parameter]} for parameter in self.model.parameters()], lr=1e-3
        )
        self.train()
        self.extra = {
            "grid": torch.zeros(4, 4),
            "more": {"list": [torch.zeros(2), 3], "tuple": (torch.zeros(2), "x")},
            "losses": [0.5],
            "nothing": None,
            1: torch.zeros(3),
        }

    def train(self) -> None:
        self.model(torch.randn(3, 4)).sum().backward()
        self.optimizer.step()

    def components(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}


def same(first, other) -> None:
    assert first.skeleton == other.skeleton
    assert repr(first.values) == repr(other.values)
    assert (first.aliases, first.parameters) == (other.aliases, other.parameters)
    assert first.metadata == other.metadata
    assert first.signature() == other.signature()
    for a, b in zip(first.tensors, other.tensors, strict=True):
        assert (a.name, a.lazy, a.section) == (b.name, b.lazy, b.section)
        assert a.tensor.data_ptr() == b.tensor.data_ptr() or a.fresh
        assert a.tensor.is_conj() == b.tensor.is_conj()


def retyped(state: State) -> None:
    state.extra["grid"].data = state.extra["grid"].data.view(torch.int32)


def moment(state: State) -> torch.Tensor:
    return state.optimizer.state[state.model[0].weight]["exp_avg"]


def as_buffer(state: State) -> None:
    memory = state.model[0].weight.data
    del state.model[0].weight
    state.model[0].register_buffer("weight", memory)


def alias(state: State) -> None:
    state.extra["more"]["list"][0] = state.extra["more"]["tuple"][0]


def tied(state: State) -> None:
    state.model[1].weight = nn.Parameter(state.model[1].weight.detach())
    state.model[1].bias = state.model[1].weight


MORE = torch.ones(1)
MOVES = {
    "two parameters that are one now": tied,
    "another version of a layer": lambda s: setattr(s.model[0], "_version", 7),
    "another parameter": lambda s: setattr(s.model[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "other memory": lambda s: setattr(s.model[0].weight, "data", torch.ones(4, 4)),
    "one more": lambda s: s.model.append(nn.Linear(4, 1)),
    "one less": lambda s: s.model.pop(1),
    "other groups": lambda s: s.optimizer.param_groups.reverse(),
    "one more in a dict": lambda s: s.extra.update(new=torch.zeros(1)),
    "a key of another type": lambda s: s.extra.update({"1": s.extra.pop(1)}),
    "another name": lambda s: setattr(
        s, "extra", {{"grid": "grod"}.get(key, key): value for key, value in s.extra.items()}
    ),
    "a buffer that nobody keeps": lambda s: s.model[1]._non_persistent_buffers_set.add(
        "running_mean"
    ),
    "one buffer more": lambda s: s.model[0].register_buffer("seen", torch.zeros(1)),
    "no parameter any more": lambda s: setattr(s.model[0], "bias", None),
    "a hook of a state": lambda s: s.model[0].register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}more": MORE})
    ),
    "a state of its own": lambda s: setattr(
        s.model[1], "state_dict", lambda *_, destination, prefix, **__: destination
    ),
    "another dict of parameters": lambda s: setattr(
        s.model[0], "_parameters", {**s.model[0]._parameters, "bias": nn.Parameter(torch.ones(4))}
    ),
    "buffers of another order": lambda s: s.model[1]._buffers.update(
        running_mean=s.model[1]._buffers.pop("running_mean")
    ),
    "another class": lambda s: setattr(s.model[0], "__class__", Silent),
    "one more field": lambda s: s.optimizer.state[s.model[0].weight].update(x=torch.ones(1)),
    "a field of another name": lambda s: s.optimizer.state[s.model[0].weight].update(
        y=s.optimizer.state[s.model[0].weight].pop("exp_avg")
    ),
    "another moment": lambda s: s.optimizer.state[s.model[0].weight].update(
        exp_avg=torch.ones(4, 4)
    ),
    "a moment over the same memory": lambda s: s.optimizer.state[s.model[0].weight].update(
        exp_avg=moment(s).detach()
    ),
    "moments that changed places": lambda s: s.optimizer.state[s.model[0].weight].update(
        exp_avg=s.optimizer.state[s.model[0].weight]["exp_avg_sq"], exp_avg_sq=moment(s)
    ),
    "a number for a moment": lambda s: s.optimizer.state[s.model[0].weight].update(exp_avg=1),
    "rows of another order": lambda s: s.optimizer.state.update(
        {s.model[0].weight: s.optimizer.state.pop(s.model[0].weight)}
    ),
    "no state of a parameter": lambda s: s.optimizer.state.pop(s.model[0].weight),
    "a moment that is transposed in place": lambda s: moment(s).t_(),
    "a moment of other memory": lambda s: setattr(moment(s), "data", torch.ones(4, 4)),
    "a buffer of other memory": lambda s: setattr(s.model[1].running_mean, "data", torch.ones(4)),
    "a parameter of another shape in place": lambda s: setattr(
        s.model[0].weight, "data", s.model[0].weight.data.view(2, 8)
    ),
    "a parameter that is negated lazily": lambda s: setattr(
        s.model[1].running_mean, "data", torch._neg_view(s.model[1].running_mean.data)
    ),
    "another order": lambda s: s.extra.update(grid=s.extra.pop("grid")),
    "a tensor for a number": lambda s: s.extra["more"]["list"].__setitem__(1, torch.ones(1)),
    "a tensor for nothing": lambda s: s.extra.update(nothing=[[torch.ones(1)]]),
    "a number for a tensor": lambda s: s.extra.update(grid=1),
    "a longer list": lambda s: s.extra["more"]["list"].append(torch.ones(1)),
    "a list for a tuple": lambda s: s.extra["more"].update(tuple=[*s.extra["more"]["tuple"]]),
    "another kind of dict": lambda s: s.extra.update(more=OrderedDict(s.extra["more"])),
    "an array": lambda s: s.extra.update(nothing=numpy.zeros(70_000)),
    "another dtype": lambda s: s.extra.update(grid=s.extra["grid"].view(torch.int32)),
    "another shape": lambda s: s.extra.update(grid=s.extra["grid"].view(2, 8)),
    "fewer rows": lambda s: s.extra.update(grid=s.extra["grid"][:2]),
    "other strides": lambda s: s.extra.update(grid=s.extra["grid"].t()),
    "an alias": alias,
    "rows that grew": lambda s: s.extra["grid"].resize_(2, 4),
    "a dimension in place": lambda s: s.extra["grid"].unsqueeze_(0),
    "transposed in place": lambda s: s.extra["grid"].t_(),
    "another dtype in place": retyped,
    "a smaller moment": lambda s: moment(s).resize_(2, 2),
    "a parameter over the same memory": lambda s: setattr(
        s.model[0], "weight", nn.Parameter(s.model[0].weight.data)
    ),
    "a buffer for a parameter": as_buffer,
    "the same numbers by other hands": lambda s: s.extra.update(grid=s.extra["grid"].detach()),
    "state that is loaded": lambda s: s.optimizer.load_state_dict(
        copy.deepcopy(s.optimizer.state_dict())
    ),
}
STAYS = {
    "nothing": lambda s: None,
    "a step": State.train,
    "values": lambda s: s.extra.update(losses=[0.5, {"a": [0.25]}]),
    "a learning rate": lambda s: s.optimizer.param_groups[0].update(lr=0.5),
    "the loader's place": lambda s: s.extra["more"]["list"].__setitem__(1, 4),
    "evaluation": lambda s: s.model.eval(),
    "a gradient": lambda s: s.model[0].weight.requires_grad_(False),
}


def around(change) -> tuple:
    """A state as it was taken before a change and is taken again after it, which is as a walk would
    take it; and its components."""
    state = State()
    before = capture_state(state.components())
    for _ in range(2):  # what is compared is gathered the first time
        assert recapture_state(before, state.components(), ALONE).tensors is before.tensors
    change(state)
    now = recapture_state(before, state.components(), ALONE)
    same(now, capture_state(state.components()))
    return before, now, state.components()


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_recapture_detects_reallocated_tensors(move):
    before, now, components = around(move)
    assert now.tensors is not before.tensors
    same(recapture_state(now, components, ALONE), now)


@pytest.mark.parametrize("change", STAYS.values(), ids=STAYS)
def test_a_recapture_reuses_unchanged_tensors(change):
    before, now, _ = around(change)
    assert now.tensors is before.tensors


def test_a_recapture_detects_a_layer_that_moved_to_another_module():
    """All lists of what there is stay the same, but for where each module's part ends."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential())
    before = capture_state({"model": model})
    assert recapture_state(before, {"model": model}, ALONE).tensors is before.tensors
    model[1].add_module("0", model[0].pop(0))
    now = recapture_state(before, {"model": model}, ALONE)
    assert [leaf.name for leaf in now.tensors] == ["model.1.0.weight", "model.1.0.bias"]


@pytest.mark.parametrize("at", [0, 255, 256, 700, -1])
@pytest.mark.parametrize("change", [torch.ones(4), torch.ones(2)], ids=["memory", "shape"])
def test_a_recapture_detects_a_single_reallocated_tensor_among_many(at, change):
    parts = {"extra": {str(index): torch.zeros(4) for index in range(701)}}
    before = capture_state(parts)
    for _ in range(3):
        assert recapture_state(before, parts, ALONE).tensors is before.tensors
    list(parts["extra"].values())[at].data = change
    assert recapture_state(before, parts, ALONE).tensors is not before.tensors


def test_a_recapture_reuses_tied_weights_and_shared_layers():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, layer, nn.Linear(2, 2))
    model[2].weight = layer.weight
    parts = {"model": model, "again": {"w": layer.weight.detach()}}
    before = capture_state(parts)
    for _ in range(3):
        assert recapture_state(before, parts, ALONE).tensors is before.tensors
    model[2].weight = nn.Parameter(layer.weight.detach().clone())
    same(recapture_state(before, parts, ALONE), capture_state(parts))


class Extra(nn.Linear):
    """A layer with a state beside its tensors."""

    asked = 0

    def get_extra_state(self) -> int:
        self.asked += 1
        return 5


def of_a_class() -> nn.Module:
    return Extra(2, 2)


def with_a_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.asked = 0
    layer.register_state_dict_pre_hook(
        lambda module, *_: setattr(module, "asked", module.asked + 1)
    )
    return layer


def of_an_object() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.asked = 0

    def save(destination, prefix, keep_vars) -> None:
        layer.asked += 1
        nn.Linear._save_to_state_dict(layer, destination, prefix, keep_vars)

    layer._save_to_state_dict = save
    return layer


@pytest.mark.parametrize("make", [of_a_class, with_a_hook, of_an_object])
def test_a_custom_state_dict_of_a_module_is_called_at_each_save(make):
    model = nn.Sequential(nn.Linear(2, 2), make())
    before = capture_state({"model": model})
    for _ in range(3):
        same(recapture_state(before, {"model": model}, ALONE), before)
    assert model[1].asked == 4


class Around(torch.optim.Optimizer):
    """Hands all on to another one, as Accelerate's does: `Optimizer.__init__` never ran."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()


def test_the_state_dict_of_a_wrapping_optimizer_is_called_at_each_save():
    state = State()
    parts = {"model": state.model, "optimizer": Around(state.optimizer)}
    before = capture_state(parts)
    for rate in (0.5, 0.25):
        state.optimizer.param_groups[0]["lr"] = rate
        same(recapture_state(before, parts, ALONE), capture_state(parts))


def test_a_recapture_detects_added_removed_and_reordered_components():
    state = State()
    parts = state.components()
    before = capture_state(parts)
    for other in (
        {**parts, "new": {"x": torch.ones(1)}},
        {name: parts[name] for name in ("model", "extra")},
        dict(reversed(parts.items())),
        {"net" if name == "model" else name: part for name, part in parts.items()},
    ):
        same(recapture_state(before, other, ALONE), capture_state(other))


def test_a_recapture_detects_replaced_or_rewrapped_components():
    state = State()
    parts = state.components()
    before = capture_state(parts)
    for name, other in (
        ("model", dict(state.model.state_dict())),
        ("extra", dict(state.extra)),
    ):
        now = recapture_state(before, {**parts, name: other}, ALONE)
        assert now.tensors is not before.tensors
        same(now, capture_state({**parts, name: other}))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (lambda wave: wave, lambda wave: wave.conj()),
        (lambda wave: wave.imag, lambda wave: wave.conj().imag),
    ],
    ids=["conjugated", "negative"],
)
@pytest.mark.parametrize("kind", ["buffer", "dict"])
def test_a_recapture_detects_a_conjugate_or_negative_view_of_the_same_memory(was, now, kind):
    wave, module, extra = torch.tensor([1 + 2j, 3 - 4j]), nn.Module(), {}
    parts = {"m": module, "extra": extra}
    put = module.register_buffer if kind == "buffer" else extra.__setitem__
    put("part", was(wave))
    before = capture_state(parts)
    put("part", now(wave))
    (leaf,) = recapture_state(before, parts, ALONE).tensors
    assert leaf.tensor.is_conj() or leaf.tensor.is_neg()


def test_an_empty_tensor_on_an_unsupported_device_is_refused_by_a_recapture_too():
    module = nn.Module()
    module.register_buffer("part", torch.zeros(0))
    before = capture_state({"m": module})
    module.part = torch.zeros(0, device="meta")
    with pytest.raises(UsageError, match=r"m\.part: tensors on 'meta'"):
        recapture_state(before, {"m": module}, ALONE)


def test_a_buffer_without_memory_is_refused_by_a_recapture_too():
    state = State()
    before = capture_state(state.components())
    state.model[1].running_mean = torch.zeros(4).to_sparse()
    with pytest.raises(UsageError, match=r"model\.1\.running_mean: only dense"):
        recapture_state(before, state.components(), ALONE)


def a_ring():
    ring = torch.zeros(4, 2)
    return {"ring": ring, "newest": ring[0]}


def twins():
    tensor = torch.zeros(2)
    return {"a": {"t": tensor}, "b": {"t": tensor}}


def overlap(extra) -> None:
    extra["b"].set_(extra["a"].untyped_storage(), 2, (2,), (1,))


PARTS = {
    "an array becomes a tuple": (
        lambda: {"array": numpy.zeros(70_000)},
        lambda extra: extra.update(array=(1, 2)),
    ),
    "two dicts become one": (twins, lambda extra: extra.update(b=extra["a"])),
    "a view moves": (a_ring, lambda extra: extra.update(newest=extra["ring"][3])),
    "a parameter requires no gradient now": (
        lambda: {"prompt": nn.Parameter(torch.zeros(2))},
        lambda extra: extra["prompt"].requires_grad_(False),
    ),
    "a tensor stands in a deque, too": (
        lambda: {"window": deque([torch.zeros(2)]), "last": torch.ones(2)},
        lambda extra: extra["window"].append(extra["last"]),
    ),
    "tensors overlap now": (lambda: {"a": torch.zeros(4), "b": torch.zeros(2)}, overlap),
}


@pytest.mark.parametrize(("make", "change"), PARTS.values(), ids=PARTS)
def test_a_recapture_of_changed_components_equals_a_full_capture(make, change):
    parts = {"extra": make()}
    before = capture_state(parts)
    same(recapture_state(before, parts, ALONE), before)
    change(parts["extra"])
    now = recapture_state(before, parts, ALONE)
    same(now, capture_state(parts))
    assert (now.values, now.skeleton, now.signature()) != (
        before.values,
        before.skeleton,
        before.signature(),
    )


def test_arrays_are_copied_each_time():
    parts = {"extra": {"array": numpy.zeros(70_000)}}
    before = capture_state(parts)
    parts["extra"]["array"] += 1
    (leaf,) = recapture_state(before, parts, ALONE).tensors
    assert leaf.tensor.eq(1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda extra: extra["more"]["list"].__setitem__(0, torch.zeros(2).to_sparse()),
            r"extra\.more\.list\.0: only dense",
        ),
        (
            lambda extra: extra["losses"].append(torch.zeros(2).to_sparse()),
            r"extra\.losses\.1: only dense",
        ),
        (lambda extra: extra.update({object(): extra.pop(1)}), r"extra: the key <object object"),
    ],
)
def test_an_unsupported_value_in_a_recapture_is_refused_with_its_location(change, message):
    state = State()
    before = capture_state(state.components())
    change(state.extra)
    with pytest.raises(UsageError, match=message):
        recapture_state(before, state.components(), ALONE)


def test_freed_storage_is_not_read_by_a_recapture():
    model = nn.Linear(4, 4)
    before = capture_state({"model": model})
    model.weight.untyped_storage().resize_(0)
    try:
        with pytest.raises(UsageError, match=r"model\.weight: .* no memory of its own"):
            recapture_state(before, {"model": model}, ALONE)
    finally:
        model.weight.untyped_storage().resize_(64)  # a failing test prints it


def test_a_recapture_detects_an_address_that_another_tensor_reuses():
    """After a storage was resized, the allocator may give its old place to any tensor."""
    extra = {"grid": torch.zeros(4)}
    before = capture_state({"extra": extra})
    extra["grid"] = torch.ones(4)
    (leaf,) = before.tensors
    before = replace(
        before,
        tensors=(leaf._replace(mark=snapshot_tensor_metadata(extra["grid"], extra["grid"])),),
    )
    (leaf,) = recapture_state(before, {"extra": extra}, ALONE).tensors
    assert leaf.tensor.eq(1).all()


@pytest.fixture
def mesh():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_recapture_reuses_a_sharded_tensor_while_its_placement_is_unchanged(mesh):
    module = nn.Module()
    module.register_buffer("part", DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)]))
    before = capture_state({"m": module})
    assert recapture_state(before, {"m": module}, ALONE).tensors is before.tensors
    for other in (Replicate(), Shard(1)):
        module.part = DTensor.from_local(module.part.to_local(), mesh, [other])
        now = recapture_state(before, {"m": module}, ALONE)
        assert now.tensors is not before.tensors
        same(now, capture_state({"m": module}))
    for other in (
        module.part.to_local(),
        DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)]),
    ):
        module.part = other
        assert recapture_state(before, {"m": module}, ALONE).tensors is not before.tensors


def test_a_module_under_fsdp2_is_read_as_sharded_and_without_a_call_of_state_dict(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()  # which registers its hooks
    optimizer.step()
    parts = {"model": model, "optimizer": optimizer}
    before = capture_state(parts)
    for _ in range(3):
        model[0].unshard()
        assert not isinstance(model[0].weight, DTensor)
        assert recapture_state(before, parts, ALONE).tensors is before.tensors
        assert isinstance(model[0].weight, DTensor)
    assert before.cache["modules"]["model"] is not None
    state = optimizer.state[model[0].weight]
    for change in (
        lambda: setattr(state["exp_avg"], "_local_tensor", torch.ones(4, 4)),
        lambda: state.update(exp_avg=state["exp_avg"].detach()),
        lambda: setattr(model[1].weight, "_local_tensor", torch.ones(4, 4)),
    ):
        change()
        now = recapture_state(before, parts, ALONE)
        assert now.tensors is not before.tensors
        same(now, capture_state(parts))
        before = now


def test_a_local_shard_that_does_not_fit_its_sharding_is_refused_by_a_recapture_too(mesh):
    module, local = nn.Module(), torch.zeros(4)
    module.register_buffer("part", placed(local, mesh))
    before = capture_state({"m": module})
    for other in (placed(local[:3], mesh), placed(local, mesh, of=5)):
        module.part = other
        with pytest.raises(UsageError, match="does not understand this sharding"):
            recapture_state(before, {"m": module}, ALONE)


def placed(local, mesh, *, of=4):
    """A part of a tensor of so many elements, whatever its own size."""
    return DTensor.from_local(local, mesh, [Shard(0)], shape=(of,), stride=(1,))
