"""Everything in a state that is not a tensor, as JSON that gives back the same types.

Values that JSON can hold exactly are plain JSON. Any other value is an object with one key that
begins with `!`: `{"!tuple": [1, 2]}`. A dict that would look like that, or whose keys are not all
strings, is a list of pairs under `!dict`. So no text has two meanings. Reading runs no code: pickle
is a tag, too, but is refused unless the caller trusts the file.

An object that can change and is met twice is one object again: `!def` holds it at its first place,
`!ref` stands at the others. Long lists of numbers are bytes behind the JSON, because a script that
appends each loss to a list pays for the whole list at each save.

A pickle must not hold what lives: a copy of it would go its own way after a restore, in silence. A
scheduler in a pickle would bring an optimizer of its own, which trains nothing; a loader's
generator would be drawn from by nobody. Such objects are kept as components, in place.
"""

from __future__ import annotations

import base64
import json
import math
import pathlib
import pickle
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from operator import itemgetter
from typing import Any

from keepstep.errors import FormatError
from keepstep.image import codecs, strictjson
from keepstep.image.strictjson import error_text, has_no_surrogates

MAX_DEPTH = 100
"""A tree that is nested deeper than this is assumed to contain itself."""

_BIG = 1 << 63
_MOST_ALIKE = 256
_MIN_ROOM = 64 << 10
_MAX_SPARE = 1 << 20
_LEAST_PACKED = 64
_MOST_COLUMNS = 64
_NUMBER_BYTES = 8
_CODES: dict[type, str] = {float: "d", int: "q"}
_PAIRS: dict[type, str] = {Counter: "!counter", OrderedDict: "!ordereddict"}
_FACTORIES = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, set, frozenset, Counter, OrderedDict, defaultdict, deque),
    )
}
"""The allowed `default_factory` of a defaultdict, by name."""

_SEQUENCES: dict[type, str] = {tuple: "!tuple", set: "!set", frozenset: "!frozenset"}
_PATHS = {
    kind.__name__: kind
    for kind in (
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.WindowsPath,
    )
}


def encode(value: Any, *, trusted: bool = False) -> bytes:
    """A line of JSON of `value`, in ASCII, and the bytes of its long lists of numbers. `trusted`:
    pickle values that cannot be encoded otherwise.

    Raises Unheld.
    """
    encoder = _Encoder(trusted)
    tree = encoder.encode(value, MAX_DEPTH)
    if encoder.twice:  # where such an object is met first is known only now
        encoder = _Encoder(trusted, encoder)
        tree = encoder.encode(value, MAX_DEPTH)
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")
    return b"".join([text, b"\n", *encoder.packed]) if encoder.packed else text


def decode(data: bytes | bytearray | memoryview, *, trusted: bool = False) -> Any:
    """Inverse of `encode`. Arrays are new and writable.

    Raises FormatError for damaged or hostile data, and for pickles unless `trusted`.
    """
    data = bytes(data)
    end = data.find(b"\n")
    text, numbers = (data, b"") if end < 0 else (data[:end], memoryview(data)[end + 1 :])
    decoder = _Decoder(trusted, numbers)
    value = strictjson.loads(text, what="extras", hook=decoder.build)
    decoder.end()
    return value


def json_tree_of(value: Any) -> Any:
    """What `encode` makes JSON of, for a small value. Raises Unheld."""
    encoder = _Encoder(trusted=False)
    tree = encoder.encode(value, MAX_DEPTH)
    if encoder.packed or encoder.twice:
        raise Unheld("it holds many numbers, or one object twice")
    return tree


def make_json_hook() -> Callable[[strictjson.Pairs], Any]:
    """The hook of `strictjson.loads` that rebuilds such values."""
    return _Decoder(trusted=False, numbers=b"").build


def capacity_for(size_bytes: int) -> int:
    """Bytes that a layout reserves for extras of `size_bytes`. They include room to grow, so that a
    growing list does not need a new layout at every step. The room is limited, so that a large
    value does not make the image much larger."""
    return max(_MIN_ROOM, size_bytes + min(3 * size_bytes, _MAX_SPARE))


class Unheld(FormatError):
    """A value cannot be encoded; `why` is the reason. `place`: where it is in the tree
    (`['a'][0]`), put together on the way up."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why, self.place = why, ""

    def __str__(self) -> str:
        return f"extras: {self.place or 'the value itself'}: {self.why}"


def _is_shared(kind: type) -> bool:
    """Whether an object of this type, met twice, must be one object again: it can change, or is
    known by its identity.

    It has no hash, or none that depends on other objects. So no hash of a decoded object, and no
    comparison of two keys, follows a `!ref`: nested ones would take exponential time.
    """
    how: Any = kind.__hash__
    return how is None or how is object.__hash__ or codecs.is_tensor_type(kind)


class _Encoder:
    """Encodes values of exact types only, because a subclass may mean more than its value.

    `twice`: the ids of objects that were met twice. A second encoder, with the first one as
    `before`, refers to them. `packed`: the bytes behind the JSON.
    """

    def __init__(self, trusted: bool, before: _Encoder | None = None) -> None:
        self._trusted = trusted
        self._before = before  # keeps its objects alive, so that ids stay theirs
        self._met: dict[int, Any] = {}
        self._open: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._arrays: dict[int, array[Any]] = {} if before is None else before._arrays
        self._repeated: set[int] = set() if before is None else before.twice
        self.twice: set[int] = set()
        self.packed: list[array[Any]] = []

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_BIG < value < _BIG else {"!int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"!float": struct.pack(">d", value).hex()}
        if kind is str:
            if value.isascii() or has_no_surrogates(value):
                return value
            return {"!str": _base64(value.encode("utf-8", "surrogatepass"))}
        if depth == 0:
            raise Unheld(f"nested deeper than {MAX_DEPTH}")
        if not _is_shared(kind):
            return self._tree(value, kind, depth - 1)
        key = id(value)
        if key in self._met:
            return self._again(key)
        self._met[key] = value
        self._open.add(key)
        tree = self._tree(value, kind, depth - 1)
        self._open.discard(key)
        if key not in self._repeated:
            return tree
        self._numbers[key] = len(self._numbers)
        return {"!def": tree}

    def _again(self, key: int) -> Any:
        if key in self._open:
            raise Unheld("it contains itself")
        if self._before is None:
            self.twice.add(key)
            return None
        if key not in self._numbers:
            raise Unheld("it changes while it is encoded, in another thread")
        return {"!ref": self._numbers[key]}

    def _tree(self, value: Any, kind: type, depth: int) -> Any:
        if kind is dict:
            return self._dict(value, depth)
        if kind is list:
            return self._items(value, depth)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, depth)}
        if kind in _PAIRS:
            tree = {_PAIRS[kind]: self._pairs(value, depth)}
            # the state of a module has its `_metadata` so
            return {"!attributes": [tree, self._dict(vars(value), depth)]} if vars(value) else tree
        if kind is deque:
            return {"!deque": [value.maxlen, self._items(value, depth)]}
        try:
            return self._made(value, kind, depth)
        except codecs.NotData as error:
            return self._pickle(value, kind, str(error))

    def _made(self, value: Any, kind: type, depth: int) -> Any:
        if kind is defaultdict:
            return {"!defaultdict": [_factory(value), self._pairs(value, depth)]}
        parts = codecs.decompose_value(value)
        if parts is None:
            return self._leaf(value, kind)
        tag, simpler = parts
        if type(simpler) is list:
            return {tag: [self.encode(value, depth) for value in simpler]}
        return {tag: simpler}

    def _leaf(self, value: Any, kind: type) -> Any:
        if kind is bytes or kind is bytearray:
            return {f"!{kind.__name__}": _base64(value)}
        if kind is complex:
            return {"!complex": struct.pack(">dd", value.real, value.imag).hex()}
        if _PATHS.get(kind.__name__) is kind:
            return {"!path": [kind.__name__, self.encode(str(value), 0)]}
        return self._pickle(value, kind, f"{_name(kind)} cannot be kept as data")

    def _pickle(self, value: Any, kind: type, why: str) -> Any:
        if (held := unpicklable_part(value)) is not None:
            raise Unheld(f"{why}: {held}")
        if not self._trusted:
            raise Unheld(f"{why}; pass trusted=True to pickle it")
        try:
            return {"!pickle": _base64(pickle.dumps(value, protocol=4))}
        except Exception as error:  # a foreign __reduce__ may raise anything
            raise Unheld(f"{_name(kind)} cannot be pickled: {error}") from error

    def _items(self, items: Collection[Any], depth: int) -> Any:
        if len(items) >= _LEAST_PACKED and (packed := self._packed(items)) is not None:
            return packed
        encoded: list[Any] = []
        try:
            encoded.extend(self.encode(item, depth) for item in items)
        except Unheld as error:
            error.place = f"[{len(encoded)}]{error.place}"
            raise
        return encoded

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        for key in value:  # before any value is encoded, as what is met twice must be in the JSON
            if (
                type(key) is not str
                or key[:1] == "!"
                or not (key.isascii() or has_no_surrogates(key))
            ):
                return {"!dict": self._pairs(value, depth)}
        return {key: self._value(key, value, depth) for key, value in value.items()}

    def _pairs(self, value: dict[Any, Any], depth: int) -> Any:
        if len(value) >= _LEAST_PACKED and (packed := self._columns([value, value.values()])):
            return {"!rows": ["list", *packed]}
        return [
            [self._value(key, key, depth), self._value(key, value, depth)]
            for key, value in value.items()
        ]

    def _value(self, key: Any, value: Any, depth: int) -> Any:
        try:
            return self.encode(value, depth)
        except Unheld as error:
            error.place = f"[{key!r:.80}]{error.place}"
            raise

    # --- numbers -------------------------------------------------------------------------------

    def _packed(self, items: Collection[Any]) -> Any:
        """Many numbers, or many rows of numbers of one kind, as bytes; None for anything else."""
        kinds = set(map(type, items))
        kind = kinds.pop()
        if kinds:
            return None
        if kind in _CODES:
            packed = self._columns([items])
            return packed and {"!numbers": [packed[0], packed[1]]}
        return self._rows(items, kind) if kind in (tuple, list, dict) else None

    def _rows(self, rows: Collection[Any], kind: type) -> Any:
        first = next(iter(rows))
        values = first.values() if kind is dict else first
        if not 0 < len(first) <= _MOST_COLUMNS or not {*map(type, values)} <= _CODES.keys():
            return None
        keys = list(first) if kind is dict else list(range(len(first)))
        if len(set(map(len, rows))) > 1 or (kind is dict and not _are_keys(keys, rows)):
            return None
        if kind is not tuple and not self._are_single(rows):
            return None
        packed = self._columns([list(map(itemgetter(key), rows)) for key in keys])
        return packed and {"!rows": [keys if kind is dict else kind.__name__, *packed]}

    def _are_single(self, rows: Collection[Any]) -> bool:
        """Whether none of these objects is met elsewhere, as far as is known; notes them as met."""
        met = dict(zip(map(id, rows), rows, strict=True))
        fresh = self._met.keys().isdisjoint(met) and self._repeated.isdisjoint(met)
        if len(met) < len(rows) or not fresh:
            return False
        self._met |= met
        return True

    def _columns(self, columns: list[Collection[Any]]) -> list[Any] | None:
        """`[codes, length]` of columns of numbers, which are packed; None for anything else."""
        made: list[array[Any]] = []
        for column in columns:
            if (numbers := self._array(column)) is None:
                return None
            made.append(numbers)
        self.packed += made
        return ["".join(column.typecode for column in made), len(made[0])]

    def _array(self, column: Collection[Any]) -> array[Any] | None:
        if (known := self._arrays.get(id(column))) is not None:
            return known
        kinds = set(map(type, column))
        code = _CODES.get(kinds.pop())
        if kinds or code is None:
            return None
        try:
            made = array(code, column)
        except OverflowError:
            return None
        if id(column) in self._met:  # alive as long as this is, so the id stays its own
            self._arrays[id(column)] = made
        return made


def _are_keys(keys: list[Any], rows: Collection[dict[Any, Any]]) -> bool:
    """Whether all rows have these keys in this order, and the keys are text."""
    texts = all(type(key) is str and has_no_surrogates(key) for key in keys)
    return texts and len(set(map(tuple, rows))) == 1


class _Decoder:
    """Builds objects from the innermost outwards, so the content of a tag is already decoded.

    `numbers`: the bytes behind the JSON. They are read once, from first to last, so a small text
    cannot make many lists of them.
    """

    def __init__(self, trusted: bool, numbers: bytes | memoryview) -> None:
        self._trusted = trusted
        self._left = memoryview(numbers)
        self._defined: list[Any] = []
        self._builders = {
            **_BUILDERS,
            "!def": self._define,
            "!ref": self._refer,
            "!numbers": self._to_numbers,
            "!rows": self._to_rows,
        }

    def build(self, pairs: strictjson.Pairs) -> Any:
        if len(pairs) != 1 or pairs[0][0][:1] != "!":
            return strictjson.dict_of_unique_keys(pairs)
        tag, value = pairs[0]
        if tag not in self._builders:
            raise FormatError(f"unknown tag {tag[:80]!r}")
        if tag == "!pickle" and not self._trusted:
            raise FormatError("holds a pickle: pass trusted=True if you trust its author")
        try:
            return self._builders[tag](value)
        except MemoryError:  # no fault of the value
            raise
        except Exception as error:  # constructors of three libraries may reject a hostile value
            raise FormatError(f"not a {tag[1:]}: {error_text(error)}") from None

    def end(self) -> None:
        """Check that all numbers were read. Raises FormatError."""
        if len(self._left):
            raise FormatError(f"extras: {len(self._left)} bytes of numbers that nothing names")

    def _define(self, value: Any) -> Any:
        if not _is_shared(type(value)):
            raise TypeError(f"a {type(value).__name__} is not shared")
        self._defined.append(value)
        return value

    def _refer(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self._defined):
            raise ValueError("it names no object that came before")
        return self._defined[number]

    def _to_numbers(self, parts: Any) -> list[Any]:
        (numbers,) = self._take(parts[0], parts[1:])
        return numbers

    def _to_rows(self, parts: Any) -> list[Any]:
        keys, codes, *count = _list_of(parts)
        columns = self._take(codes, count)
        rows = zip(*columns, strict=True)
        if keys == "tuple":
            return list(rows)
        if keys == "list":
            return [list(row) for row in rows]
        if len(set(_list_of(keys))) != len(columns) or not all(type(key) is str for key in keys):
            raise ValueError("its keys do not suit its columns")
        return [dict(zip(keys, row, strict=True)) for row in rows]

    def _take(self, codes: Any, count: Any) -> list[list[Any]]:
        (length,) = count
        if type(codes) is not str or not 0 < len(codes) <= _MOST_COLUMNS or set(codes) - {*"dq"}:
            raise ValueError("not a kind of numbers")
        if type(length) is not int or not 0 < length * len(codes) * _NUMBER_BYTES <= len(
            self._left
        ):
            raise ValueError("it has too few bytes")
        columns = []
        for code in codes:
            end = length * _NUMBER_BYTES
            column = array(code)
            column.frombytes(self._left[:end])
            self._left = self._left[end:]
            columns.append(column.tolist())
        return columns


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _factory(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise codecs.NotData(
            f"a defaultdict of {factory!r} cannot be kept; of {', '.join(_FACTORIES)} it can"
        )
    return str(name)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _list_of(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"a list is needed, got {type(value).__name__}")
    return value


def _members(value: Any) -> list[Any]:
    check_hash_collisions(items := _list_of(value))
    return items


def check_hash_collisions(keys: Iterable[Any]) -> None:
    """Raises ValueError if too many keys have the same hash. A dict compares such keys with each
    other, which takes quadratic time. A hostile file may have many integers that are equal modulo
    2^61 - 1."""
    alike = Counter(map(hash, keys))
    if alike and max(alike.values()) > _MOST_ALIKE:
        raise ValueError(f"more than {_MOST_ALIKE} keys have one hash")


def _dict_of(value: Any) -> dict[Any, Any]:
    pairs = _list_of(value)
    check_hash_collisions(_list_of(pair)[0] for pair in pairs)
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("a key comes twice")
    return built


def _with_attributes(value: Any) -> Any:
    made, attributes = _list_of(value)
    if type(made) not in _PAIRS or type(attributes) is not dict:
        raise TypeError("not a dict and its attributes")
    vars(made).update(attributes)
    return made


def _deque_of(value: Any) -> deque[Any]:
    maxlen, items = _list_of(value)
    return deque(_list_of(items), maxlen)


def _defaultdict_of(value: Any) -> defaultdict[Any, Any]:
    name, pairs = _list_of(value)
    return defaultdict(None if name is None else _FACTORIES[name], _dict_of(pairs))


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!int": lambda text: int(text, 16),
    "!float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "!complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "!str": lambda text: _bytes(text).decode("utf-8", "surrogatepass"),
    "!bytes": _bytes,
    "!bytearray": lambda text: bytearray(_bytes(text)),
    "!tuple": lambda items: tuple(_list_of(items)),
    "!set": lambda items: set(_members(items)),
    "!frozenset": lambda items: frozenset(_members(items)),
    "!dict": _dict_of,
    "!counter": lambda pairs: Counter(_dict_of(pairs)),
    "!ordereddict": lambda pairs: OrderedDict(_dict_of(pairs)),
    "!attributes": _with_attributes,
    "!defaultdict": _defaultdict_of,
    "!deque": _deque_of,
    "!path": lambda pair: _PATHS[pair[0]](pair[1]),
    "!pickle": lambda text: pickle.loads(_bytes(text)),
    **codecs.BUILDERS,
}


_MOST_BYTES = 64 << 20

_LIVING = (
    ("torch.optim", "Optimizer", "an optimizer"),
    ("torch.nn", "Module", "a module"),
    ("torch.utils.data", "DataLoader", "a data loader"),
    ("torch", "Generator", "a random generator"),
    ("numpy.random", "Generator", "a random generator"),
    ("numpy.random", "RandomState", "a random generator"),
    ("numpy.random", "BitGenerator", "a random generator"),
    ("random", "Random", "a random generator"),
    ("keepstep", "Checkpointer", "a Checkpointer"),
)


def unpicklable_part(value: Any) -> str | None:
    """What `value` is or holds that no pickle may hold, and what to do instead; None if there is
    nothing of that kind in the first 64 MiB of its pickle."""
    found = _Search(value).found
    if found is None:
        return None
    held, what = found
    kind = f"{type(held).__module__}.{type(held).__qualname__}"
    if held is value:
        return f"it is {what}: {_remedy(what)}"
    return (
        f"it holds {what} ({kind}), of which a pickle would make a copy: {_remedy(what)}, and"
        " leave it out of this value (of the state_dict() that gives it), or give the class a"
        " state_dict() of plain values"
    )


def _remedy(what: str) -> str:
    if what == "a random generator":
        return "keep it in a dict or list of its own, or name it as a component"
    return "name it as a component of its own"


class _Search(pickle.Pickler):
    """Pickles to nowhere, until it meets something living. `found`: that object, and what it is."""

    def __init__(self, value: Any) -> None:
        super().__init__(self, protocol=4)
        self.found: tuple[Any, str] | None = None
        self._written = 0
        self._living = [
            (kind, what)
            for module, name, what in _LIVING
            if isinstance(kind := getattr(sys.modules.get(module), name, None), type)
        ]
        self._kinds = tuple(kind for kind, _ in self._living)
        try:
            self.dump(value)
        except Exception:  # a foreign __reduce__ may raise anything; `_Found` ends the search
            pass
        finally:
            self.clear_memo()

    def write(self, data: bytes) -> int:
        """Stands for the file."""
        self._written += len(data)
        if self._written > _MOST_BYTES:
            raise _Found
        return len(data)

    def persistent_id(self, value: Any) -> None:
        """Called for every object before it is pickled."""
        if isinstance(value, self._kinds):
            self.found = value, next(what for kind, what in self._living if isinstance(value, kind))
            raise _Found


class _Found(Exception):
    """Ends a search."""
