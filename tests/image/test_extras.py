"""Extras: whatever a state holds besides tensors comes back with its types."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import io
import math
import pickle
import random
import struct
import subprocess
import sys
import types
import uuid
import zoneinfo
from collections import defaultdict, deque
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from keepstep.errors import FormatError
from keepstep.image import extras_codec
from tests.image.strategies import states


def same(first: Any, two: Any) -> bool:
    """Equal with types, the signs of zeros, the bits of NaNs, and the order of dicts."""
    if type(first) is not type(two):
        return False
    if isinstance(first, float):
        return struct.pack(">d", first) == struct.pack(">d", two)
    if isinstance(first, complex):
        return same(first.real, two.real) and same(first.imag, two.imag)
    if isinstance(first, deque) and first.maxlen != two.maxlen:
        return False
    if isinstance(first, defaultdict) and first.default_factory is not two.default_factory:
        return False
    if isinstance(first, datetime.datetime | datetime.time):
        return (repr(first), first.fold) == (repr(two), two.fold)
    if isinstance(first, list | tuple | deque):
        return len(first) == len(two) and all(map(same, first, two))
    if isinstance(first, dict):
        return same(list(first), list(two)) and same(list(first.values()), list(two.values()))
    if isinstance(first, set | frozenset):
        return sorted(map(_key, first)) == sorted(map(_key, two))
    return bool(first == two)


def _key(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_key, value))}"
    if isinstance(value, tuple):
        return f"tuple {[_key(item) for item in value]}"
    return f"{type(value).__name__} {hex(value) if type(value) is int else value!r}"


@settings(max_examples=300)
@given(states)
def test_a_state_survives_a_round_trip_with_its_types(state: Any) -> None:
    assert same(extras_codec.decode(extras_codec.encode(state)), state)


@settings(max_examples=100)
@given(states, states)
def test_shared_objects_are_decoded_as_one_object(first: Any, two: Any) -> None:
    shared = [first, {"deep": two}]
    kept = {"a": shared, "b": (shared, {3: [two, shared]}), "c": [shared, first]}
    back = extras_codec.decode(extras_codec.encode(kept))
    assert same(back, kept)
    assert back["b"][0] is back["a"] is back["c"][0] is back["b"][1][3][1]
    for value, other in [(back["c"][1], back["a"][0]), (back["b"][1][3][0], back["a"][1]["deep"])]:
        assert (value is other) or type(value).__hash__ not in (None, object.__hash__)


def test_heavily_shared_objects_are_encoded_in_little_time_and_space() -> None:
    tree: list[Any] = []
    for _ in range(90):
        tree = [tree, tree]
    data = extras_codec.encode(tree)
    assert len(data) < 4000
    back = extras_codec.decode(data)
    assert back[0] is back[1]


def test_rows_that_are_referenced_elsewhere_keep_their_identity() -> None:
    rows = [[n, 0.5] for n in range(100)]
    for kept in ({"rows": rows, "best": rows[7]}, {"best": rows[7], "rows": rows}):
        back = extras_codec.decode(extras_codec.encode(kept))
        assert same(back, kept)
        assert back["best"] is back["rows"][7]
    twice = [rows[0]] * 100
    assert extras_codec.decode(extras_codec.encode(twice))[3] is not None
    back = extras_codec.decode(extras_codec.encode(twice))
    assert back[0] is back[99]


@pytest.mark.parametrize(
    "numbers",
    [
        [0.5] * 64,
        [1 << 62, -(1 << 63)] * 50,
        [1 << 63] * 100,
        [True] * 100,
        [1.0, 1] * 100,
        [(1, 2.0)] * 100,
        [(1,), (1, 2)] * 100,
        [(), ()] * 100,
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}] * 50,
        [{1: 1.0} for _ in range(100)],
        [(float("nan"), -0.0)] * 100,
        deque(range(100), 100),
        set(range(100)),
        frozenset(range(-100, 100)),
        dict.fromkeys(range(100), 0.5),
        defaultdict(int, zip(range(100), range(100), strict=True)),
        [struct.unpack(">d", bytes.fromhex("7ff4000000000001"))[0]] * 100,
        [np.float64(1.0)] * 100,
    ],
    ids=lambda value: f"{type(value).__name__} {next(iter(value))!r}"[:40],
)
def test_long_lists_of_numbers_survive_a_round_trip_exactly(numbers: Any) -> None:
    assert same(
        extras_codec.decode(extras_codec.encode({"n": numbers, "more": [0.25] * 70}))["n"], numbers
    )


@pytest.mark.parametrize(
    "text",
    [
        b'{"!ref":0}',
        b'[{"!ref":0},{"!def":[]}]',
        b'[{"!def":[]},{"!ref":1}]',
        b'[{"!def":[]},{"!ref":-1}]',
        b'[{"!def":[]},{"!ref":true}]',
        b'{"!def":{"!ref":0}}',
        b'{"!def":1}',
        b'{"!def":"ab"}',
        b'{"!def":{"!tuple":[]}}',
        b'{"!numbers":["d",1]}',
        b'{"!numbers":["d",2]}\n12345678',
        b'{"!numbers":["d",0]}',
        b'{"!numbers":["d",-1]}\n12345678',
        b'{"!numbers":["d",1,1]}\n12345678',
        b'{"!numbers":["dd",1]}\n1234567812345678',
        b'{"!numbers":["B",8]}\n12345678',
        b'{"!numbers":["d",1.0]}\n12345678',
        b'{"!numbers":1}',
        b'[{"!numbers":["d",1]},{"!numbers":["d",1]}]\n12345678',
        b"[]\n12345678",
        b'{"!rows":["set","d",1]}\n12345678',
        b'{"!rows":[["a","b"],"d",1]}\n12345678',
        b'{"!rows":[["a","a"],"dd",1]}\n1234567812345678',
        b'{"!rows":[[1],"d",1]}\n12345678',
        b'{"!rows":["tuple","",1]}\n',
        b'{"!flag":["tests.image.test_extras","Phase",1]}',
        b'{"!flag":["tests.image.test_extras","Flag","1"]}',
        b'{"!flag":["os","path",1]}',
        b'{"!namedtuple":["tests.image.test_extras","Pair",[1]]}',
        b'{"!namedtuple":["tests.image.test_extras","Best",[1,2]]}',
        b'{"!namedtuple":["os","stat_result",[1]]}',
        b'{"!simplenamespace":[[]]}',
        b'{"!namespace":[{"!dict":[[1,2]]}]}',
        b'{"!slice":3}',
        b'{"!ellipsis":false}',
        b'{"!uuid":"xyz"}',
        b'{"!numpy.dtype":"O"}',
        b'{"!numpy.objects":[[1000000000],[]]}',
        b'{"!numpy.objects":[[1],{"!tuple":[1]}]}',
        b'{"!numpy.fields":["|O8",[1],{"!bytes":"AAAAAAAAAAA="}]}',
        b'{"!numpy.fields":[[{"!tuple":["a","|O8"]}],[1],{"!bytes":"AAAAAAAAAAA="}]}',
        b'{"!numpy.fields":[[{"!tuple":["a","<f8"]}],[1000000000],{"!bytes":""}]}',
        b'{"!view":["float32",-1,[1],[1]]}',
        b'{"!view":["float32",0,[1],[]]}',
        b'{"!view":["os",0,[1],[1]]}',
        b'{"!shared":"a"}',
        b'{"!subclass":["builtins","int",null,[1],[1]]}',
        b'{"!subclass":["torch","Tensor",null,[1],[1]]}',
        b'{"!class":["os","path"]}',
        b'{"!class":["builtins","int"]}',
        b'{"!random.Random":[3,{"!bytes":""},null]}',
        b'{"!random.Random":[3,5,null]}',
        b'{"!torch.Generator":["cpu",{"!bytes":"AAAA"}]}',
        b'{"!torch.Generator":["os",{"!bytes":"AAAA"}]}',
        b'{"!numpy.random.BitGenerator":["default_rng",{},null]}',
        b'{"!numpy.random.BitGenerator":["PCG64",{},null]}',
        b'{"!numpy.random.BitGenerator":["PCG64",{},[{"!int":"0x1' + b"0" * 5000 + b'"},[],4,0]]}',
        b'{"!numpy.random.Generator":[1]}',
        b'{"!numpy.random.RandomState":[1,2,3]}',
    ],
)
def test_hostile_references_and_numbers_are_refused(text: bytes) -> None:
    with pytest.raises(FormatError):
        extras_codec.decode(text)


class Phase(enum.Enum):
    WARM = "warm"
    COLD = 2


class Flag(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Best:
    loss: float
    at: list[int] = dataclasses.field(default_factory=lambda: pytest.fail("a default was made"))

    def __post_init__(self) -> None:
        self.derived = self.loss * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: dict[str, Any]


@dataclasses.dataclass
class Keeps(dict):  # type: ignore[type-arg]
    x: int = 0


@dataclasses.dataclass
class Ends:
    x: int = 0

    def __del__(self) -> None:
        pass


class OwnZone(datetime.tzinfo):
    pass


TZIF = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + bytes(6) + b"UTC\0"


def test_enums_and_dataclasses_survive_a_round_trip_without_running_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = Best(1.5, [3])
    best.seen = (Phase.COLD, Flag.B)  # type: ignore[attr-defined]
    point = Point(1, {"a": {2}})
    data = extras_codec.encode([best, point])
    for kind in (Best, Point):
        monkeypatch.setattr(kind, "__init__", lambda self: pytest.fail("it was made anew"))
    back, other = extras_codec.decode(data)
    assert vars(back) == {"loss": 1.5, "at": [3], "derived": 3.0, "seen": (Phase.COLD, Flag.B)}
    assert back.seen[0] is Phase.COLD
    assert type(back) is Best
    assert other == point


def test_the_error_for_an_unknown_class_names_it() -> None:
    data = extras_codec.encode({"p": Phase.WARM, "b": Best(1.5, [3])})
    assert "antigravity" not in sys.modules
    for old, new, message in [
        (b'"Phase"', b'"Phrase"', "no class tests.image.test_extras.Phrase; import it"),
        (b'"Phase"', b'"Best"', "is no enum"),
        (b'"Best"', b'"Phase"', "is no plain dataclass"),
        (b'"WARM"', b'"HOT"', "has no member 'HOT'"),
        (b'"at"', b'"on"', "fields that were not saved: .'at'"),
        (b"tests.image.test_extras", b"antigravity", "no class antigravity"),
    ]:
        assert data != data.replace(old, new)
        with pytest.raises(FormatError, match=message):
            extras_codec.decode(data.replace(old, new))
    assert "antigravity" not in sys.modules


def test_objects_that_only_look_like_plain_data_are_refused_by_name() -> None:
    @dataclasses.dataclass
    class Here:
        x: int = 1

    for value, message in [
        (Here(), "Here is not found by its name; define it at the top of a module"),
        (Keeps(), "Keeps is more than its fields"),
        (Ends(), "Ends is more than its fields"),
        (defaultdict(lambda: 0), "a defaultdict of <function .* cannot be kept; of bool, int"),
        (Fraction(1, 1 << 5000), "fraction of numbers so large"),
        (datetime.datetime(2026, 1, 1, tzinfo=OwnZone()), "OwnZone cannot be kept as data"),
        (zoneinfo.ZoneInfo.from_file(io.BytesIO(TZIF)), "time zone without a key"),
    ]:
        with pytest.raises(
            FormatError, match=rf"extras: \['a'\]\[0\].*: .*{message}.*trusted=True"
        ):
            extras_codec.encode({"a": [value]})


@pytest.mark.parametrize(
    "text",
    [
        b'{"!enum":["os","path","x"]}',
        b'{"!enum":["re","RegexFlag",["A"]]}',
        b'{"!enum":[["re"],"RegexFlag","A"]}',
        b'{"!dataclass":["tests.image.test_extras","Best",{"loss":1}]}',
        b'{"!dataclass":["tests.image.test_extras","Point",{"x":1,"y":2,"z":3}]}',
        b'{"!dataclass":["tests.image.test_extras","Keeps",{"x":1}]}',
        b'{"!dataclass":["tests.image.test_extras","Best.__init__.x",{}]}',
        b'{"!dataclass":["tests.image.test_extras","Best",[["loss",1]]]}',
        b'{"!dataclass":1}',
        b'{"!deque":[-1,[]]}',
        b'{"!deque":[99999999999999999999999999,[1]]}',
        b'{"!deque":[null,"ab"]}',
        b'{"!defaultdict":["eval",[]]}',
        b'{"!defaultdict":[[],[]]}',
        b'{"!counter":[[1]]}',
        b'{"!ordereddict":[["a",1],["a",2]]}',
        b'{"!datetime":["2026-13-01",0,null]}',
        b'{"!datetime":["2026-01-01",2,null]}',
        b'{"!datetime":["2026-01-01",0,"utc"]}',
        b'{"!time":[1,2,3]}',
        b'{"!date":"x"}',
        b'{"!timedelta":[1e300,0,0]}',
        b'{"!timedelta":[99999999999999,0,0]}',
        b'{"!timezone":[5]}',
        b'{"!timezone":{"a":1}}',
        b'{"!zoneinfo":"../../etc/passwd"}',
        b'{"!zoneinfo":"/etc/passwd"}',
        b'{"!zoneinfo":"Nowhere/\\u0000"}',
        b'{"!zoneinfo":[1]}',
        b'{"!range":[0,1,0]}',
        b'{"!range":"abc"}',
        b'{"!decimal":"one"}',
        b'{"!decimal":1.5}',
        b'{"!fraction":[1,0]}',
        b'{"!fraction":["1",2]}',
        b'{"!fraction":[1,{"!int":"0x1' + b"0" * 5000 + b'"}]}',
    ],
)
def test_a_hostile_value_of_any_tag_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError):
        extras_codec.decode(b'{"a":[' + text + b"]}")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"loader": [{"workers": (0, object())}]}, r"\['loader'\]\[0\]\['workers'\]\[1\]: "),
        ({3: {"x": print}}, r"\[3\]\['x'\]: builtins.builtin_function"),
        (object(), "the value itself: builtins.object"),
        ({"a": np.array([object()])}, r"\['a'\].*: builtins.object"),
        ({"a": torch.zeros(2).to_sparse()}, r"\['a'\]: torch.Tensor"),
    ],
)
def test_an_unsupported_value_is_refused_with_its_location_and_the_fix(value, place) -> None:
    with pytest.raises(FormatError, match=rf"extras: {place}.*pass trusted=True"):
        extras_codec.encode(value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = [tree]
    with pytest.raises(FormatError, match="contains itself"):
        extras_codec.encode(tree)


def test_the_deepest_tree_that_is_written_is_read() -> None:
    tree: Any = 1
    for _ in range(extras_codec.MAX_DEPTH):
        tree = {1: tree}
    assert extras_codec.decode(extras_codec.encode(tree)) == tree
    with pytest.raises(FormatError, match="nested deeper"):
        extras_codec.encode([tree])


class Loader:
    """Something that only pickle holds."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loader)

    __hash__ = None


def test_a_pickle_is_written_and_read_only_when_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Loader", Loader)
    data = extras_codec.encode({"loader": Loader()}, trusted=True)
    assert extras_codec.decode(data, trusted=True) == {"loader": Loader()}
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("a pickle was loaded"))
    with pytest.raises(FormatError, match="trusted=True"):
        extras_codec.decode(data)


def test_an_instance_that_pickle_refuses_is_named() -> None:
    with pytest.raises(FormatError, match=r"\['f'\]: builtins.function cannot be pickled"):
        extras_codec.encode({"f": lambda: None}, trusted=True)


def test_foreign_json_is_decoded_exactly_or_refused() -> None:
    assert math.copysign(1, extras_codec.decode(b"-0.0")) == -1
    for text in (b"NaN", b"Infinity", b"[1,]", b"\xff", b"", b"1" * 5000):
        with pytest.raises(FormatError):
            extras_codec.decode(text)


def test_neither_torch_nor_numpy_is_imported_for_plain_values() -> None:
    script = (
        "import sys; from keepstep.image import extras_codec;"
        "extras_codec.decode(extras_codec.encode({'a': (1, b'x', {2: 3})}));"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


class Pair(NamedTuple):
    x: Any
    y: Any = 0


class Named(collections.namedtuple("Named", "x y")):  # it has attributes, too, but none here
    pass


class Word(str):
    __slots__ = ()


class Color(enum.StrEnum if sys.version_info >= (3, 11) else enum.Enum):  # type: ignore[misc]
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, [2]),
        Named(1, [2]),
        [Pair(1, 2)] * 100,
        Flag.A | Flag.B,
        Flag(0),
        Color.RED,
        ...,
        types.SimpleNamespace(a=1, b=[2]),
        argparse.Namespace(lr=0.1, name="x"),
        uuid.UUID(int=3),
        np.dtype("float32"),
        np.dtype(">i8"),
        slice(None, 3),
    ],
    ids=repr,
)
def test_further_kinds_of_values_survive_a_round_trip_with_their_type(value: Any) -> None:
    back = extras_codec.decode(extras_codec.encode({"a": value}))["a"]
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    "value",
    [
        Word("a"),
        type("Int", (int,), {})(3),
        type("List", (list,), {})([1]),
        collections.UserDict(a=1),
        types.MappingProxyType({}),
        memoryview(b"ab"),
        functools.partial(int, "3"),
        int,
        len,
        NotImplemented,
        object(),
        np.ma.array([1, 2]),
        np.zeros(2, [("a", "O")]),
        torch.nn.Parameter(torch.zeros(2)),
        random.SystemRandom(),
        io.StringIO(),
        (n for n in "ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_would_come_back_as_another_type_is_refused(value: Any) -> None:
    with pytest.raises(FormatError, match=r"\['a'\]\[0\]: "):
        extras_codec.encode({"a": [value]})


def test_small_tensors_keep_their_gradients_and_their_order() -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    back = extras_codec.decode(extras_codec.encode([image.requires_grad_(), image]))
    assert back[0] is back[1]
    assert back[0].requires_grad
    assert back[0].stride() == image.stride()
    assert torch.equal(back[0], image)


class Holds:
    """A scheduler that has another one, say."""

    def __init__(self, inner: Any) -> None:
        self.inner = [{"deep": inner}]


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(
    ("inner", "what"),
    [
        (_optimizer, "an optimizer"),
        (lambda: torch.optim.lr_scheduler.StepLR(_optimizer(), 1), "an optimizer"),
        (lambda: torch.nn.Linear(1, 1), "a module"),
        (lambda: torch.Generator(), "a random generator"),
        (lambda: np.random.default_rng(1), "a random generator"),
        (lambda: np.random.RandomState(1), "a random generator"),
        (lambda: random.Random(1), "a random generator"),
        (lambda: torch.utils.data.DataLoader([1, 2]), "a data loader"),
    ],
)
@pytest.mark.parametrize("trusted", [True, False])
def test_an_object_that_holds_a_module_or_other_stateful_object_is_not_pickled(
    inner: Any, what: str, trusted: bool
) -> None:
    with pytest.raises(FormatError, match=f"it holds {what} .*as a component") as raised:
        extras_codec.encode({"a": Holds(inner())}, trusted=trusted)
    assert "trusted=True" not in str(raised.value)


def test_a_module_inside_a_dict_is_refused_with_a_hint_to_make_it_a_component() -> None:
    with pytest.raises(FormatError, match="it is a module: name it as a component of its own"):
        extras_codec.encode({"a": torch.nn.Linear(1, 1)}, trusted=True)


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, "a", None, [2]], dtype=object),
        np.array([[1.5, (2,)], [None, {"a": 1}]], dtype=object),
        np.empty((0, 3), object),
        np.zeros(2, [("x", "f4"), ("y", "<i8", (2,))]),
        np.array([(1, (2.0, b"ab"))], [("a", "i1"), ("b", [("c", ">f8"), ("d", "S2")])]),
        np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    ],
    ids=lambda array: str(array.dtype),
)
def test_object_arrays_and_structured_arrays_survive_a_round_trip(array: np.ndarray) -> None:
    back, again = extras_codec.decode(extras_codec.encode([array, array]))
    assert back is again
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert repr(back.tolist()) == repr(array.tolist())
    for element in array.reshape(-1)[:1]:
        if type(element) is np.void:
            scalar = extras_codec.decode(extras_codec.encode(element))
            assert type(scalar) is np.void
            assert (scalar.dtype, repr(scalar.tolist())) == (element.dtype, repr(element.tolist()))


def test_datetimes_survive_a_round_trip_while_the_datetime_classes_are_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [datetime.datetime(2026, 1, 2), datetime.date(2026, 1, 2), datetime.timedelta(5)]
    for name in ("datetime", "date", "timedelta"):
        monkeypatch.setattr(datetime, name, type(name, (getattr(datetime, name),), {}))
    data = extras_codec.encode(kept)
    monkeypatch.undo()
    assert same(extras_codec.decode(data), kept)
