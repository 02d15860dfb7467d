"""Everything in a state that is not a tensor, as JSON that gives back the same types.

Values that JSON can hold exactly are plain JSON. Any other value is an object with one key that
begins with `!`: `{"!tuple": [1, 2]}`. A dict that would look like that, or whose keys are not all
strings, is a list of pairs under `!dict`. So no text has two meanings. Reading runs no code: pickle
is a tag, too, but is refused unless the caller trusts the file. Shared references become copies.
"""

from __future__ import annotations

import base64
import json
import math
import pathlib
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from keepstep.errors import FormatError
from keepstep.image import arrays, objects, strictjson
from keepstep.image.fields import reason
from keepstep.image.strictjson import is_text

MAX_DEPTH = 100
"""A tree that is nested deeper than this is assumed to contain itself."""

_BIG = 1 << 63
_MOST_ALIKE = 256
_MIN_ROOM = 64 << 10
_MAX_SPARE = 1 << 20
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
    """JSON of `value`, in ASCII. `trusted`: pickle values that cannot be encoded otherwise.

    Raises Unheld.
    """
    tree = _Encoder(trusted).encode(value, MAX_DEPTH)
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode(data: bytes | bytearray | memoryview, *, trusted: bool = False) -> Any:
    """Inverse of `encode`. Arrays are new and writable.

    Raises FormatError for damaged or hostile data, and for pickles unless `trusted`.
    """
    return strictjson.loads(data, what="extras", hook=_Decoder(trusted).build)


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


class _Encoder:
    """Encodes values of exact types only, because a subclass may mean more than its value."""

    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_BIG < value < _BIG else {"!int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"!float": struct.pack(">d", value).hex()}
        if kind is str:
            if is_text(value):
                return value
            return {"!str": _base64(value.encode("utf-8", "surrogatepass"))}
        if depth == 0:
            raise Unheld(f"nested deeper than {MAX_DEPTH}, or it contains itself")
        if kind is dict:
            return self._dict(value, depth - 1)
        if kind is list:
            return self._items(value, depth - 1)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, depth - 1)}
        if kind in _PAIRS:
            return {_PAIRS[kind]: self._pairs(value, depth - 1)}
        if kind is deque:
            return {"!deque": [value.maxlen, self._items(value, depth - 1)]}
        try:
            return self._made(value, kind, depth - 1)
        except objects.NotData as error:
            return self._pickle(value, kind, str(error))

    def _made(self, value: Any, kind: type, depth: int) -> Any:
        if kind is defaultdict:
            return {"!defaultdict": [_factory(value), self._pairs(value, depth)]}
        parts = objects.parts_of(value)
        if parts is None:
            return self._leaf(value, kind)
        tag, simpler = parts
        if type(simpler) is list:
            return {tag: [self.encode(one, depth) for one in simpler]}
        return {tag: simpler}

    def _leaf(self, value: Any, kind: type) -> Any:
        if kind is bytes or kind is bytearray:
            return {f"!{kind.__name__}": _base64(value)}
        if kind is complex:
            return {"!complex": struct.pack(">dd", value.real, value.imag).hex()}
        if _PATHS.get(kind.__name__) is kind:
            return {"!path": [kind.__name__, self.encode(str(value), 0)]}
        if (tagged := arrays.encode(value)) is not None:
            return tagged
        return self._pickle(value, kind, f"{_name(kind)} cannot be kept as data")

    def _pickle(self, value: Any, kind: type, why: str) -> Any:
        if not self._trusted:
            raise Unheld(f"{why}; pass trusted=True to pickle it")
        try:
            return {"!pickle": _base64(pickle.dumps(value, protocol=4))}
        except Exception as error:  # a foreign __reduce__ may raise anything
            raise Unheld(f"{_name(kind)} cannot be pickled: {error}") from error

    def _items(self, items: Iterable[Any], depth: int) -> list[Any]:
        encoded: list[Any] = []
        try:
            encoded.extend(self.encode(item, depth) for item in items)
        except Unheld as error:
            error.place = f"[{len(encoded)}]{error.place}"
            raise
        return encoded

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        plain: dict[str, Any] = {}
        for key, one in value.items():
            if type(key) is not str or key[:1] == "!" or not is_text(key):
                return {"!dict": self._pairs(value, depth)}
            plain[key] = self._value(key, one, depth)
        return plain

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[Any]:
        return [
            [self._value(key, key, depth), self._value(key, one, depth)]
            for key, one in value.items()
        ]

    def _value(self, key: Any, value: Any, depth: int) -> Any:
        try:
            return self.encode(value, depth)
        except Unheld as error:
            error.place = f"[{key!r:.80}]{error.place}"
            raise


class _Decoder:
    """Builds objects from the innermost outwards, so the content of a tag is already decoded."""

    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted

    def build(self, pairs: strictjson.Pairs) -> Any:
        if len(pairs) != 1 or pairs[0][0][:1] != "!":
            return strictjson.unique(pairs)
        tag, value = pairs[0]
        if tag not in _BUILDERS:
            raise FormatError(f"unknown tag {tag[:80]!r}")
        if tag == "!pickle" and not self._trusted:
            raise FormatError("holds a pickle: pass trusted=True if you trust who wrote it")
        try:
            return _BUILDERS[tag](value)
        except MemoryError:  # no fault of the value
            raise
        except Exception as error:  # constructors of three libraries may reject a hostile value
            raise FormatError(f"not a {tag[1:]}: {reason(error)}") from None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _factory(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise objects.NotData(
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
    check_spread(items := _list_of(value))
    return items


def check_spread(keys: Iterable[Any]) -> None:
    """Raises ValueError if too many keys have the same hash. A dict compares such keys with each
    other, which takes quadratic time. A hostile file may have many integers that are equal modulo
    2^61 - 1."""
    alike = Counter(map(hash, keys))
    if alike and max(alike.values()) > _MOST_ALIKE:
        raise ValueError(f"more than {_MOST_ALIKE} keys have one hash")


def _dict_of(value: Any) -> dict[Any, Any]:
    pairs = _list_of(value)
    check_spread(_list_of(pair)[0] for pair in pairs)
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("a key comes twice")
    return built


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
    "!defaultdict": _defaultdict_of,
    "!deque": _deque_of,
    "!path": lambda pair: _PATHS[pair[0]](pair[1]),
    "!pickle": lambda text: pickle.loads(_bytes(text)),
    **arrays.BUILDERS,
    **objects.BUILDERS,
}
