"""What a tree of state is, as flat text: values bit by bit, types, order, and what is one object.

Two trees are alike if their descriptions are equal. An object that is met again is described by the
path at which it was met first, and so is a tensor that overlaps another one in memory, with the
distance between both. So a difference in one place stays in one place. What a storage holds beside
these tensors is not described: nothing can be seen of it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import random
import struct
import types
from typing import Any

import numpy as np
import torch

Description = dict[str, str]

_CONSTANTS = (
    *(type(None), bool, int, str, bytes, complex, range, frozenset, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def describe(tree: Any, path: str = "") -> Description:
    """One line of text for each place in `tree`, by its path."""
    walk = _Walk()
    walk.place(path, tree)
    return walk.found


def differences(expected: Description, got: Description) -> list[str]:
    """The paths that are not described alike, in the order of `expected`."""
    return [path for path in {**expected, **got} if expected.get(path) != got.get(path)]


class _Walk:
    def __init__(self) -> None:
        self.found: Description = {}
        self._first: dict[int, str] = {}
        self._memory: dict[int, list[tuple[str, int, int]]] = {}
        self._alive: list[Any] = []  # an address says something only while its object lives

    def place(self, path: str, value: Any) -> None:
        if isinstance(value, float):
            self.found[path] = f"{_kind(value)} {struct.pack('>d', value).hex()} ({value!r})"
        elif isinstance(value, np.generic):
            self.found[path] = f"{_kind(value)} {value.tobytes().hex()} ({value!r})"
        elif isinstance(value, _CONSTANTS):
            self.found[path] = f"{_kind(value)} {value!r}"
        elif isinstance(value, _FUNCTIONS):
            self.found[path] = f"{_kind(value)} {value.__module__}.{value.__qualname__}"
        elif isinstance(value, tuple):
            self._content(path, value)
        elif id(value) in self._first:
            self.found[path] = f"is {self._first[id(value)]}"
        else:
            self._first[id(value)] = path
            self._alive.append(value)
            self._content(path, value)

    def _content(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            self._array(path, value)
        elif isinstance(value, dict | types.MappingProxyType):
            self._mapping(path, value)
        elif isinstance(value, list | tuple | collections.deque):
            self.found[path] = f"{_kind(value)} of {len(value)}{_bound(value)}"
            for number, each in enumerate(value):
                self.place(f"{path}[{number}]", each)
        elif isinstance(value, set):
            self.found[path] = f"{_kind(value)} {sorted(map(repr, value))}"
        elif (state := _generator_state(value)) is not None:
            self.found[path] = _kind(value)
            self.place(f"{path} state", state)
        elif isinstance(value, torch.nn.Module):
            self.found[path] = f"{_kind(value)} training={value.training}"
            self.place(f"{path} state", value.state_dict(keep_vars=True))
        else:
            self._object(path, value)

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        shape = f"{_kind(value)} {value.dtype} {tuple(value.shape)} {value.layout} {value.device}"
        grad = " requires grad" if value.requires_grad else ""
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            self.found[path] = f"{shape}{grad} of {names} {context!r}"
            for name in names:
                self.place(f"{path}.{name}", getattr(value, name))
            return
        if value.layout is not torch.strided:
            self.found[path] = shape + grad
            self.place(f"{path} dense", value.detach().to_dense())
            return
        if value.is_quantized:
            self.found[path] = f"{shape} {value.qscheme()}"
            return self.place(f"{path} values", value.int_repr())
        flags = " conjugate" * value.is_conj() + " negative" * value.is_neg()
        reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        begin = value.storage_offset() * value.element_size()
        where = self._shared(
            path,
            value.untyped_storage()._cdata,
            begin,
            begin + (reach + 1) * value.element_size() if value.numel() else begin,
        )
        self.found[path] = f"{shape}{grad}{flags} {value.stride()}{where} {_digest(value)}"
        if own := {key: var for key, var in vars(value).items() if not key.startswith("_")}:
            self.place(f"{path} attributes", own)

    def _shared(self, path: str, storage: int, begin: int, end: int) -> str:
        """Of which tensor or array met before this one has memory, and at which distance."""
        known = self._memory.setdefault(storage, [])
        for other, its_begin, its_end in known:
            if begin < its_end and its_begin < end:
                return f" {begin - its_begin:+} bytes in {other}"
        known.append((path, begin, end))
        return ""

    def _array(self, path: str, value: np.ndarray[Any, Any]) -> None:
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        self._alive.append(root)
        where = self._shared(path, id(root), *np.lib.array_utils.byte_bounds(value))
        text = f"{_kind(value)} {value.dtype} {value.shape} {value.strides}{where}"
        if value.dtype.hasobject:
            self.found[path] = text
            return self.place(f"{path} items", value.tolist())
        self.found[path] = f"{text} {hashlib.sha1(value.tobytes()).hexdigest()[:16]}"

    def _mapping(self, path: str, value: Any) -> None:
        factory = getattr(value, "default_factory", None)
        made_by = f" of {factory.__qualname__}" if factory else ""
        keys = ", ".join(f"{key!r}" for key in value)
        self.found[path] = f"{_kind(value)}{made_by} of {len(value)}: {keys[:2000]}"
        for key, each in value.items():
            self.place(f"{path}[{type(key).__name__[:1]}{key!r}]", each)
        if own := getattr(value, "__dict__", None):
            self.place(f"{path} attributes", dict(own))

    def _object(self, path: str, value: Any) -> None:
        self.found[path] = _kind(value)
        if dataclasses.is_dataclass(value):
            own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        else:
            own = dict(getattr(value, "__dict__", ()))
            for name in getattr(type(value), "__slots__", ()):
                if hasattr(value, name):
                    own[name] = getattr(value, name)
            if not own:
                self.found[path] += f" {value!r}"
        for name, each in own.items():
            self.place(f"{path}.{name}", each)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _bound(value: Any) -> str:
    return f" at most {value.maxlen}" if isinstance(value, collections.deque) else ""


def _digest(value: torch.Tensor) -> str:
    plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.sha1(data).hexdigest()[:16]


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else None
