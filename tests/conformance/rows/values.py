"""Plain dicts: what they hold, what is shared in them, what grows, and generators."""

from __future__ import annotations

import argparse
import array
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.conformance.rows.small import batch, loss_of, net, trained
from tests.conformance.table import Result, Table, Training

TABLE = Table("Dicts, values and generators")


def _kept(
    state: dict[str, Any], change: Callable[[dict[str, Any], int], Any], **more: Any
) -> Training:
    """A loop whose whole state is a dict. `change` trains; what it returns is compared."""
    return Training(components={"state": state}, step=lambda number: change(state, number), **more)


class Phase(enum.Enum):
    WARMUP = "warmup"
    FULL = "full"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Best:
    loss: float
    weights: dict[str, torch.Tensor]
    history: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float


class Config(dict[str, Any]):
    """Keys as attributes."""


class Pair(collections.namedtuple("Pair", "first second")):
    pass


# --- what a dict may hold -----------------------------------------------------------------------


def _counts(state: dict[str, Any], step: int) -> Any:
    state["n"] = state.get("n", 0) + 1
    return state["n"]


_VALUES: dict[str, Callable[[], dict[Any, Any]]] = {
    "numbers": lambda: {
        **{"big": (1 << 53) + 1, "huge": -(1 << 100), "yes": True, "z": 1 - 2j, "zero": -0.0},
        **{"tiny": 5e-324, "inf": float("inf"), "ninf": float("-inf"), "most": 1.7e308},
    },
    "NaN with its payload": lambda: {
        "nan": struct.unpack(">d", bytes.fromhex("7ff8000000abcdef"))[0],
        "negative": struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0],
    },
    "numbers of numpy": lambda: {
        **{"f4": np.float32(1.1), "f8": np.float64(0.1), "i8": np.int64(1 << 60)},
        **{"u8": np.uint64(2**64 - 1), "b": np.bool_(True), "c": np.complex64(1 - 2j)},
    },
    "text, bytes and None": lambda: {
        **{
            "text": "ä \ud83d\ude80 \0",
            "bytes": b"\0\xff",
            "array": bytearray(b"ab"),
            "none": None,
        },
    },
    "nested containers": lambda: {"x": [1, (2, [3.5, {"y": ((),)}]), {}, []], "t": (1, "a", None)},
    "sets and frozensets": lambda: {"set": {3, 1, 2}, "frozen": frozenset({("a", 1)}), "no": set()},
    "deque with maxlen": lambda: {"d": collections.deque([1, 2], maxlen=3)},
    "OrderedDict, defaultdict and Counter": lambda: {
        "o": collections.OrderedDict(b=1, a=2),
        "d": collections.defaultdict(list, {"x": [1]}),
        "c": collections.Counter("abracadabra"),
    },
    "paths, dates, Decimal, Fraction, range": lambda: {
        **{"path": pathlib.PurePosixPath("a/b"), "decimal": decimal.Decimal("1.10")},
        **{"fraction": fractions.Fraction(1, 3), "range": range(1, 9, 2)},
        **{"when": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)},
        **{"lasts": datetime.timedelta(days=1, microseconds=1)},
    },
    "dtypes, devices and sizes of torch": lambda: {
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
    },
    "enums": lambda: {"phase": Phase.FULL, "level": Level.HIGH, Phase.WARMUP: 1, "in": [Level.LOW]},
    "dataclasses": lambda: {
        "best": Best(0.5, {"w": torch.ones(2)}, [1.0]),
        "point": Point(1.0, -0.0),
    },
    "keys that are int beside str": lambda: {1: torch.tensor(1), "1": torch.tensor(2), 2: 3},
    "keys that are floats, tuples, None and booleans": lambda: {
        **{0.5: torch.ones(1), (0, "a"): torch.zeros(1), None: torch.ones(2), True: torch.ones(3)},
    },
    "keys with dots, beside nested ones": lambda: {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1), "b.c": torch.ones(3)},
        "a.b.c": torch.ones(2),
    },
    "keys `w`, `w@rank-00000`, `w@rank-00001`": lambda: {
        "w@rank-00001": torch.full((2,), 5.0),
        "w": torch.full((2,), 6.0),
        "w@rank-00000": torch.full((2,), 7.0),
    },
    "keys that are empty, or `~`, `/`, `%` and blanks": lambda: {
        **{"": torch.ones(1), "~": torch.zeros(1), "~1": torch.ones(2), "/": torch.ones(3)},
        **{"%2E": torch.ones(4), " ": torch.ones(5), "ä": torch.ones(6), "\n": torch.ones(7)},
        **{"!tuple": [1], "!": {"!dict": 1}},
    },
    "the order of keys": lambda: {"z": 1, "a": torch.ones(1), "m": {"b": 1, "a": 2}, "b": 0},
}
for _name, _state in _VALUES.items():
    TABLE.add(_name, lambda state=_state: _kept(state(), _counts), kills=(2,))


_TENSORS: dict[str, Callable[[], dict[Any, Any]]] = {
    "tensors of all dtypes": lambda: {
        str(kind): torch.arange(6).to(kind)
        for kind in (
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
            *(torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
            *(torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn),
            *(torch.float8_e5m2,),
        )
    },
    "tensors that are 0-d, empty, conjugate, negative or transposed": lambda: {
        **{"zero": torch.tensor(3.5), "empty": torch.empty(0, 5), "none": torch.empty(0)},
        **{"conj": torch.randn(3, dtype=torch.complex64).conj()},
        **{"neg": torch.randn(3, dtype=torch.complex64).conj().imag},
        **{"t": torch.arange(6.0).view(2, 3).t(), "step": torch.arange(10)[::2]},
    },
    "a tensor in channels_last": lambda: {
        "x": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    },
    "tensors with NaN, infinity, -0.0 and subnormal numbers": lambda: {
        "x": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "signalling": torch.tensor([0x7FA00001, -1], dtype=torch.int32).view(torch.float32),
    },
    "an expanded tensor": lambda: {"x": torch.randn(3, 1).expand(3, 4)},
    "windows of a tensor that overlap": lambda: {"x": torch.randn(8).unfold(0, 4, 1)},
    "a Parameter, and a tensor that requires a gradient": lambda: {
        "p": nn.Parameter(torch.ones(2)),
        "r": torch.ones(2, requires_grad=True),
    },
    "arrays of numpy": lambda: {
        "f": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "text": np.array(["a", "bc"]),
        "dates": np.array(["2026-01-02"], dtype="datetime64[D]"),
        "zero": np.array(1.5),
    },
}
for _name, _state in _TENSORS.items():
    TABLE.add(_name, lambda state=_state: _kept(state(), _counts), kills=(2,))

TABLE.add(
    "a sparse tensor",
    lambda: _kept({"x": torch.eye(3).to_sparse()}, _counts),
    kills=(2,),
    keepstep=Result.REFUSED_AT_START,
    message="sparse",
    reason="keep its indices and its values",
)


class Thing:
    """An object that is no data."""

    def __init__(self) -> None:
        self.count = 0


def _uses_thing(state: dict[str, Any], step: int) -> int:
    state["thing"].count += 1
    return state["thing"].count


TABLE.add(
    "an object that is no data",
    lambda: _kept({"thing": Thing()}, _uses_thing),
    kills=(2,),
    keepstep=Result.REFUSED_AT_START,
    message="Thing",
    reason="keepstep unpickles nothing unless `trusted=True` asks for it",
)
TABLE.add(
    "an object that is no data, with trusted=True",
    lambda: _kept({"thing": Thing()}, _uses_thing, options={"trusted": True}),
    kills=(2,),
)
TABLE.add(
    "a dict that contains itself",
    lambda: _kept((lambda d: d.update(me=d) or d)({"n": 0}), _counts),
    kills=(2,),
    control=Result.DIFFERS,
    keepstep=Result.REFUSED_AT_START,
    message="itself",
    reason="a tree that contains itself is refused by name",
)


TABLE.add(
    "an array of numpy that is every second element of another one",
    lambda: _kept({"x": np.arange(9)[::2]}, _counts),
    kills=(2,),
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason="numpy pickles it without the gaps, too",
)
TABLE.add(
    "an array of numpy with fields",
    lambda: _kept({"x": np.zeros(2, dtype=[("x", "f4"), ("y", "i8")])}, _counts),
    kills=(2,),
)
TABLE.add(
    "an array of numpy with objects",
    lambda: _kept({"x": np.array([1, "a", None], dtype=object)}, _counts),
    kills=(2,),
)
TABLE.add(
    "named tuples",
    lambda: _kept({"pair": Pair(1, torch.ones(2)), "in": [Pair("a", None)]}, _counts),
    kills=(2,),
)
TABLE.add(
    "argparse.Namespace in a dict",
    lambda: _kept({"options": argparse.Namespace(lr=0.1, names=["a"])}, _counts),
    kills=(2,),
)
TABLE.add(
    "array.array in a dict",
    lambda: _kept({"numbers": array.array("d", [1.0, -0.0])}, _counts),
    kills=(2,),
    keepstep=Result.REFUSED_AT_START,
    message="array",
    reason="an object that is no data: keep a list, or an array of numpy",
)
TABLE.add(
    "a dict of its own kind inside a dict",
    lambda: _kept({"config": Config(lr=0.1)}, _counts),
    kills=(2,),
    keepstep=Result.REFUSED_AT_START,
    message="Config",
    reason="an object that is no data: keep `dict(config)`",
)


# --- what is one object -------------------------------------------------------------------------


def _episodes(state: dict[str, Any], step: int) -> Any:
    if step % 3 == 2:
        state["current"] = {"rewards": []}
        state["episodes"].append(state["current"])
    state["current"]["rewards"].append(torch.rand(()).item())
    return [list(episode["rewards"]) for episode in state["episodes"]]


@TABLE.row("one dict under two keys, and in a list")
def _() -> Training:
    first: dict[str, Any] = {"rewards": []}
    return _kept({"episodes": [first], "current": first}, _episodes)


def _shared(make: Callable[[], Any], use: Callable[[Any], Any]) -> Training:
    thing = make()

    def change(state: dict[str, Any], step: int) -> Any:
        use(state["a"])
        return copy.deepcopy(state["b"]["in"][0])

    return _kept({"a": thing, "b": {"in": [thing]}}, change)


_MAKES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda x: x.append(torch.rand(()).item())),
    "deque": (lambda: collections.deque([1]), lambda x: x.append(torch.rand(()).item())),
    "set": (lambda: {1}, lambda x: x.add(len(x) + 1)),
    "tensor": (lambda: torch.zeros(3), lambda x: x.add_(torch.rand(3))),
    "array of numpy": (lambda: np.zeros(3), lambda x: np.add(x, 1.5, out=x)),
    "dict of tensors": (lambda: {"x": torch.zeros(2)}, lambda x: x["x"].add_(torch.rand(2))),
    "OrderedDict": (lambda: collections.OrderedDict(n=0), lambda x: x.update(n=x["n"] + 1)),
    "dataclass": (lambda: Best(0.0, {}, []), lambda x: x.history.append(1.0)),
    "bytearray": (lambda: bytearray(b"a"), lambda x: x.extend(b"b")),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda x: torch.rand(1, generator=x),
    ),
    "generator of numpy": (lambda: np.random.default_rng(3), lambda x: x.random()),
}
for _name, (_make, _use) in _MAKES.items():
    if "enerator" not in _name:
        TABLE.add(f"one {_name} under two keys", _shared, _make, _use)


@TABLE.row("one list in two components")
def _() -> Training:
    cell = [0.0]
    a, b = {"one": cell}, {"in": [cell]}

    def step(number: int) -> Any:
        a["one"].append(torch.rand(()).item())
        return list(b["in"][0])

    return Training(components={"a": a, "b": b}, step=step)


@TABLE.row(
    "one dict that is a component and inside another one",
    control=Result.DIFFERS,
    reason="`torch.load` makes two of it; keepstep refills the one that is there",
)
def _() -> Training:
    inner: dict[str, Any] = {"n": 0}
    outer = {"inner": inner}

    def step(number: int) -> Any:
        inner["n"] += 1
        return outer["inner"]["n"]

    return Training(
        components={"inner": inner, "outer": outer},
        step=step,
    )


def _ring(state: dict[str, Any], step: int) -> Any:
    state["newest"] = state["ring"][step % 4]
    state["newest"].copy_(torch.randn(3))
    return state["ring"].clone()


TABLE.add(
    "a view of a larger tensor beside it",
    lambda: (lambda ring: _kept({"ring": ring, "newest": ring[0]}, _ring))(torch.zeros(4, 3)),
)


def _write_through(state: dict[str, Any], step: int) -> Any:
    state["view"].add_(1.5)
    return state["whole"].clone()


def _views(view: Callable[[torch.Tensor], torch.Tensor]) -> Training:
    whole = torch.arange(24.0)
    return _kept({"whole": whole, "view": view(whole)}, _write_through)


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a slice": lambda x: x[3:9],
    "every third element": lambda x: x[::3],
    "a transposed form": lambda x: x.view(4, 6).t(),
    "one element": lambda x: x[5],
    "another shape": lambda x: x.view(2, 3, 4),
}
for _name, _view in _VIEWS.items():
    TABLE.add(f"a tensor and {_name} of it, which is written to", _views, _view)


@TABLE.row("two slices of one tensor that is not in the state")
def _() -> Training:
    whole = torch.zeros(10)

    def change(state: dict[str, Any], step: int) -> Any:
        state["first"].add_(1.0)
        return state["second"].clone()

    return _kept({"first": whole[:6], "second": whole[4:]}, change)


@TABLE.row("a slice of a tensor that is not in the state")
def _() -> Training:
    return _kept({"x": torch.randn(8, 8)[2:4, 1:5]}, lambda state, n: state["x"].mul_(1.1).sum())


@TABLE.row(
    "a tensor of the dict that is a parameter of the model",
    control=Result.DIFFERS,
    reason="`torch.load` makes other parameters of those in the dict",
)
def _() -> Training:
    model = net()
    return trained(
        model,
        also={"state": {"first": model[0].weight, "by number": {0: model[3].bias}}},
        after=lambda step: model[0].weight.sum().item(),
    )


@TABLE.row("a tensor that the loop holds beside the dict")
def _() -> Training:
    held, count = torch.zeros(3), torch.zeros(())
    state = {"held": held, "n": {"count": count}}

    def step(number: int) -> Any:
        held.add_(torch.rand(3))
        count.add_(1)
        return [held.clone(), state["held"].clone(), count.clone()]

    return Training(components={"state": state}, step=step, restored=lambda: None)


TABLE.rows[-1] = dataclasses.replace(
    TABLE.rows[-1],
    control=Result.DIFFERS,
    reason="`torch.load` makes new tensors; keepstep fills those that the loop holds",
)


@TABLE.row(
    "a list and a dict that the loop holds beside the dict",
    control=Result.DIFFERS,
    reason="`torch.load` makes new objects; keepstep refills those that the loop holds",
)
def _() -> Training:
    items: list[float] = []
    inner: dict[str, Any] = {"n": 0}
    state = {"items": items, "inner": inner}

    def step(number: int) -> Any:
        items.append(torch.rand(()).item())
        inner["n"] += 1
        return [list(state["items"]), state["inner"]["n"]]

    return Training(components={"state": state}, step=step)


# --- what grows and changes ---------------------------------------------------------------------


def _log(state: dict[str, Any], step: int) -> int:
    if not state["losses"]:
        state["losses"].extend(torch.arange(50_000, dtype=torch.float64).mul(0.1).tolist())
    state["losses"].append(torch.rand(()).item())
    return len(state["losses"])


TABLE.add(
    "a list of 50,000 numbers that grows",
    lambda: _kept({"losses": []}, _log, final=lambda: None),
    kills=(2,),
    observed=False,
)


def _grow_list(state: dict[str, Any], step: int) -> int:
    state["all"].append(torch.full((2,), float(step)))
    return len(state["all"])


TABLE.add("a list that gets a tensor at each step", lambda: _kept({"all": []}, _grow_list))


def _grow_dict(state: dict[str, Any], step: int) -> int:
    state[f"at {step}"] = {"x": torch.rand(2), "n": step}
    return len(state)


TABLE.add("a dict that gets a tensor at each step", lambda: _kept({"n": 0}, _grow_dict))


def _grow_tensor(state: dict[str, Any], step: int) -> Any:
    state["x"] = torch.cat([state["x"], torch.rand(1, 3)])
    return state["x"].sum().item()


TABLE.add(
    "a tensor that gets a row at each step", lambda: _kept({"x": torch.zeros(0, 3)}, _grow_tensor)
)


def _shrink(state: dict[str, Any], step: int) -> Any:
    state["queue"].pop(0)
    state.pop(f"old {step}", None)
    return len(state["queue"])


TABLE.add(
    "a list and a dict that shrink",
    lambda: _kept(
        {"queue": [torch.full((2,), float(n)) for n in range(9)], "old 1": 1, "old 4": [2]},
        _shrink,
    ),
)


def _retype(state: dict[str, Any], step: int) -> Any:
    state["x"] = [1, "a", torch.ones(2), None, {"y": 1}, (torch.zeros(1),), 2.5, [torch.ones(1)]][
        step
    ]
    return step


TABLE.add("a value that has another type at each step", lambda: _kept({"x": 0}, _retype))


def _roll(state: dict[str, Any], step: int) -> Any:
    state["window"].append(torch.rand(2))
    return len(state["window"])


TABLE.add(
    "a full deque of tensors, which drops the oldest",
    lambda: _kept({"window": collections.deque([torch.zeros(2)] * 2, maxlen=3)}, _roll),
)


def _default(state: dict[str, Any], step: int) -> Any:
    state["by"][step % 3].append(step)
    state["count"][step % 2] += 1
    return [len(state["by"]), state["count"].most_common(1)]


TABLE.add(
    "a defaultdict and a Counter that fill",
    lambda: _kept({"by": collections.defaultdict(list), "count": collections.Counter()}, _default),
)


@TABLE.row("best weights from state_dict(), loaded after the last step")
def _() -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    state: dict[str, Any] = {"best": float("inf"), "weights": None}

    def step(number: int) -> float:
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < state["best"]:
            state.update(best=loss.item(), weights=copy.deepcopy(model.state_dict()))
        return loss.item()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(
        components={"model": model, "optimizer": optimizer, "state": state},
        step=step,
        ends=lambda: model.load_state_dict(state["weights"]),
    )


# --- generators ---------------------------------------------------------------------------------

_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.randperm(9, generator=g).tolist(),
    ),
    "Generator of numpy": (lambda: np.random.default_rng(3), lambda g: g.permutation(9).tolist()),
    "Generator of numpy on MT19937": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda g: g.normal(size=3).tolist(),
    ),
    "RandomState of numpy": (lambda: np.random.RandomState(3), lambda g: g.randn(3).tolist()),
    "random.Random": (lambda: random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
}


def _drawn(make: Callable[[], Any], draw: Callable[[Any], Any], where: str) -> Training:
    """`chance`: the loop holds it, as a sampler would."""
    chance = make()
    components = {
        "component": {"chance": chance},
        "dict": {"state": {"chance": chance}},
        "list": {"state": {"all": [{"chance": (chance, 1)}]}},
        "twice": {"state": {"a": chance, "b": [chance]}, "chance": chance},
    }[where]
    return Training(components=components, step=lambda number: draw(chance))


for _name, (_make, _draw) in _GENERATORS.items():
    TABLE.add(f"{_name} as a component", _drawn, _make, _draw, "component")
    for _where in ("dict", "list"):
        TABLE.add(
            f"{_name} in a {_where}, which the loop holds, too",
            _drawn,
            _make,
            _draw,
            _where,
            control=Result.DIFFERS,
            reason="`torch.load` makes another generator; keepstep sets the loop's",
        )
TABLE.add(
    "torch.Generator twice in a dict, and as a component",
    _drawn,
    *_GENERATORS["torch.Generator"],
    "twice",
    control=Result.DIFFERS,
    reason="`torch.load` makes another generator; keepstep sets the loop's",
)


@TABLE.row("the random numbers of torch, numpy and Python")
def _() -> Training:
    def change(state: dict[str, Any], step: int) -> Any:
        np.random.normal()  # leaves a second one behind
        return [torch.randn(1).item(), np.random.normal(), random.gauss(0, 1)]

    return _kept({"n": 0}, change)
