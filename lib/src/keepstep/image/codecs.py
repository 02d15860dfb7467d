"""Values of the standard library, of numpy and torch, and of the program's own enums, named tuples
and dataclasses, as plain data: one table (`KINDS`) of how they are taken apart and made again.

The extras name a class. It is looked up only in modules that the program has imported itself, so a
file can import nothing of the program's. For an enum, the member with the saved name is returned. A
dataclass is created without its `__init__` and gets the saved fields; a named tuple gets its items.
None of their code runs.

Encoding imports no library: values of numpy and torch exist only if the program has imported them.
Large tensors and arrays are separate entries of the image; the small ones here are the state of a
data loader. Of a large array, the extras hold what a tensor cannot express: `ArrayForm`. A restore
hands a generator that is decoded on to the one that is live (`state.rng.refill_generator`).

A form says what a tree of tensors cannot say itself: which nodes are one object, and how a tensor
lies in the memory of another one. It is a value of the image, beside the node that it belongs to.
So a view that moves along a ring buffer needs no new layout.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import datetime
import enum
import importlib
import math
import random
import re
import sys
import types
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from keepstep.errors import FormatError
from keepstep.image import strictjson
from keepstep.image.tensor_specs import dim_order, strides_with_gaps

_MAX_FRACTION = 1 << 4096
"""Reducing a hostile fraction of larger numbers to its lowest terms would take long."""


class NotData(Exception):
    """Values of this type can be plain data, but this value cannot."""


class Codec(NamedTuple):
    """How the values of one class become data: `tag`, and what `parts` takes from a value; `build`
    is its inverse. `path`: the module in which the class is found, and its name.

    `parts` raises NotData for a value that cannot be data, and returns None for one that needs a
    pickle. `build` raises whatever the constructors raise.
    """

    tag: str
    path: str
    parts: Callable[[Any], Any]
    build: Callable[[Any], Any]


def decompose_value(value: Any) -> tuple[str, Any] | None:
    """A tag, and simpler values from which `value` can be rebuilt; None for any other type. Raises
    NotData."""
    kind = type(value)
    library = str(kind.__module__).partition(".")[0]  # a class may have any value there
    row = _OF.get((library, kind.__name__))
    if row is not None and (kind is _EARLY[row.tag] or kind is _imported(row.path)):
        parts = row.parts(value)
        return None if parts is None else (row.tag, parts)
    if value is ...:
        return "!ellipsis", True
    if isinstance(value, enum.Enum):
        if isinstance(value, enum.Flag) and value.name not in vars(kind)["_member_map_"]:
            return "!flag", [*name_of(kind), _bits(value)]
        return "!enum", [*name_of(kind), _member(value)]
    if is_named_tuple(kind):
        if getattr(value, "__dict__", None):
            raise NotData(f"{kind.__module__}.{kind.__qualname__} is more than its items")
        return "!namedtuple", [*name_of(kind), list(value)]
    if dataclasses.is_dataclass(kind):
        return "!dataclass", [*name_of(kind), fields_of(value)]
    return _numpy_parts(value) if library == "numpy" and library in sys.modules else None


def _clock(value: Any) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo]


def _zone(value: Any) -> Any:
    if value.key is None:
        raise NotData("a time zone without a key cannot be kept")
    return value.key


def _fraction(value: Any) -> list[int]:
    if max(abs(value.numerator), value.denominator) >= _MAX_FRACTION:
        raise NotData("a fraction of numbers so large cannot be kept; keep both of them")
    return [value.numerator, value.denominator]


def _attributes(value: Any) -> list[Any]:
    return [vars(value)]


# --- classes ------------------------------------------------------------------------------------


def _find(module: str, name: str) -> type:
    """The class of that name, if the program has imported it; else raises ValueError. It does not
    use `getattr`, which may run code."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    if not isinstance(found, type):
        raise ValueError(f"this program has no class {module}.{name}; import it before restore()")
    return found


def name_of(kind: type) -> tuple[str, str]:
    """Module and name by which a reader finds this class. Raises NotData."""
    module, name = kind.__module__, kind.__qualname__
    try:
        same = _find(module, name) is kind
    except ValueError:
        same = False
    if not same:
        raise NotData(f"{module}.{name} is not found by its name; define it at the top of a module")
    return module, name


def _member(value: enum.Enum) -> Any:
    if vars(type(value))["_member_map_"].get(value.name) is not value:
        raise NotData(f"{value!r} is no single member of its enum, so it cannot be kept")
    return value.name


def _bits(value: enum.Flag) -> int:
    if not _has_plain_bits(type(value)):
        raise NotData(f"{value!r} is no single member of its enum, so it cannot be kept")
    return int(value.value)


def _has_plain_bits(kind: Any) -> bool:
    """Whether `enum` itself, and no code of the program, makes this class's combined members."""
    own = getattr(kind._missing_, "__func__", None)
    return issubclass(kind, enum.Flag) and own is enum.Flag._missing_.__func__  # type: ignore[attr-defined]


def is_namespace(kind: type) -> bool:
    """Whether instances are attributes without a meaning of their own."""
    late = sys.modules.get("argparse")
    return kind is types.SimpleNamespace or (late is not None and kind is late.Namespace)


def is_named_tuple(kind: type) -> bool:
    """Whether instances are tuples whose items have names, and nothing else."""
    names = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and type(names) is tuple
        and all(type(name) is str for name in names)
        and kind.__hash__ is tuple.__hash__
        and kind.__eq__ is tuple.__eq__
    )


def _slots(kind: type) -> dict[str, Any]:
    return {
        name: slot
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType) and name != "__dict__"
    }


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _is_plain(kind: type) -> bool:
    """Whether an instance consists only of its fields: no base class has memory of its own
    (`__new__`), and the class has no pickling of its own and no `__del__`."""
    methods = "__new__", "__reduce__", "__reduce_ex__"
    same = all(getattr(kind, name) is getattr(object, name) for name in methods)
    return same and not any("__del__" in vars(base) for base in kind.__mro__)


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object has in its `__dict__` and its slots."""
    slots = _slots(type(value)).items()
    kept = dict(getattr(value, "__dict__", {}))
    return kept | {name: slot.__get__(value) for name, slot in slots if _is_set(slot, value)}


def fields_of(value: Any) -> dict[str, Any]:
    """All fields and attributes of a dataclass. Raises NotData if it is more than these."""
    kind = type(value)
    if not _is_plain(kind):
        raise NotData(f"{kind.__module__}.{kind.__qualname__} is more than its fields")
    kept = attributes_of(value)
    for field in dataclasses.fields(kind):
        if field.name not in kept:
            raise NotData(f"the field {field.name!r} of a {kind.__qualname__} has no value")
    return kept


def _few(parts: Any) -> list[Any]:
    """`parts`, which must be a list. A constructor would iterate over a decoded range of any
    length."""
    if type(parts) is not list:
        raise TypeError("not a list")
    return parts


def _to_enum(parts: Any) -> Any:
    module, name, member = parts
    kind = _find(module, name)
    if not isinstance(kind, enum.EnumMeta):
        raise ValueError(f"{module}.{name} is no enum")
    members = vars(kind)["_member_map_"]
    if member not in members:
        raise ValueError(f"{module}.{name} has no member {member!r} here")
    return members[member]


def _to_flag(parts: Any) -> Any:
    module, name, bits = parts
    kind: Any = _find(module, name)
    if not isinstance(kind, enum.EnumMeta) or not _has_plain_bits(kind) or type(bits) is not int:
        raise ValueError(f"{module}.{name} has no such flags")
    return kind(bits)


def _to_namespace(kind: Any, parts: Any) -> Any:
    (attributes,) = _few(parts)
    if type(attributes) is not dict or not all(type(key) is str for key in attributes):
        raise TypeError("not attributes")
    made = kind()
    vars(made).update(attributes)
    return made


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise TypeError(what)
    return value


def _to_decimal(text: Any) -> Any:
    return _class("decimal.Decimal")(_text(text, "not a text"))


def _to_uuid(text: Any) -> Any:
    if len(_text(text, "not 32 hex digits")) != 32:
        raise TypeError("not 32 hex digits")
    return _class("uuid.UUID")(hex=text)


def _class(path: str) -> Any:
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(home), name)


def _imported(path: str) -> Any:
    home, _, name = path.rpartition(".")
    return getattr(sys.modules.get(home), name, None)


def _to_simple_namespace(parts: Any) -> Any:
    return _to_namespace(types.SimpleNamespace, parts)


def _to_arguments(parts: Any) -> Any:
    return _to_namespace(_class("argparse.Namespace"), parts)


def _to_ellipsis(mark: Any) -> Any:
    if mark is not True:
        raise TypeError("not true")
    return ...


def load_class_by_name(module: str, name: str) -> type:
    """The class of that name that `from_fields` can make an object of. Raises ValueError."""
    kind = _find(module, name)
    plain = is_namespace(kind) or (dataclasses.is_dataclass(kind) and _is_plain(kind))
    if not plain and not is_named_tuple(kind):
        raise ValueError(f"{module}.{name} is no plain dataclass")
    return kind


def from_fields(kind: Any, kept: Any) -> Any:
    """An object of this class with these fields (a dict), or these items (a tuple). Raises
    ValueError."""
    if is_named_tuple(kind) and type(kept) is tuple and len(kept) == len(kind._fields):
        return tuple.__new__(kind, kept)
    if type(kept) is not dict or is_named_tuple(kind):
        raise ValueError(f"no fields of a {kind.__qualname__}")
    if is_namespace(kind):
        return _to_namespace(kind, [kept])
    return build_dataclass(kind, kept)


def _to_object(parts: Any) -> Any:
    module, name, kept = parts
    return from_fields(
        load_class_by_name(module, name), tuple(kept) if type(kept) is list else kept
    )


def build_dataclass(kind: Any, kept: dict[str, Any]) -> Any:
    """A new dataclass with these fields. Raises ValueError if some are missing."""
    missing = {field.name for field in dataclasses.fields(kind)} - kept.keys()
    if missing:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(f"{name} has fields that were not saved: {sorted(missing)}")
    made = object.__new__(kind)
    set_fields(made, kept)
    return made


def set_fields(live: Any, kept: dict[str, Any]) -> None:
    """Give a dataclass, also a frozen one, these fields and no others."""
    slots = _slots(type(live))
    if hasattr(live, "__dict__"):
        vars(live).clear()
    for key, value in kept.items():
        if key in slots:
            slots[key].__set__(live, value)
        else:
            vars(live)[key] = value


def _to_clock(kind: Any, parts: Any) -> Any:
    text, fold, zone = parts
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _to_timedelta(parts: Any) -> datetime.timedelta:
    days, seconds, microseconds = parts
    if not all(type(part) is int for part in parts):
        raise TypeError("not whole numbers")
    return datetime.timedelta(days, seconds, microseconds)


def _to_fraction(parts: Any) -> Any:
    above, below = parts
    if type(above) is not int or type(below) is not int or max(abs(above), below) >= _MAX_FRACTION:
        raise ValueError("not two numbers of a fraction")
    return _class("fractions.Fraction")(above, below)


# --- numpy and torch ----------------------------------------------------------------------------

LARGE_BYTES = 64 << 10
"""An array of at least this size is an entry of the image: copied as memory, verified in chunks."""

_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUMm]\d{1,6}(\[\d{0,6}[A-Za-z]{1,2}\])?")
_IN_TORCH = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """What is needed to make a numpy array of a tensor's bytes: `dtype` with its byte order,
    `shape`, and whether the bytes are in Fortran order."""

    dtype: str
    shape: tuple[int, ...]
    fortran: bool

    @classmethod
    def of(cls, value: Any) -> ArrayForm | None:
        """The form of an array; None if the value is not an array, is small, or has no plain
        bytes."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or type(value) is not numpy.ndarray or value.nbytes < LARGE_BYTES:
            return None
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            return None
        return cls(value.dtype.str, value.shape, _is_fortran(value))

    def wrap_as_tensor(self, array: Any) -> Any:
        """A tensor over the array's memory, or over a copy if that memory has gaps or is read-only.

        The tensor has the array's dtype if torch has this dtype in this byte order, else it is a
        vector of bytes.
        """
        torch: Any = sys.modules["torch"]
        numpy: Any = sys.modules["numpy"]
        plain = array.T if self.fortran else numpy.ascontiguousarray(array)
        if not plain.flags.writeable:
            plain = plain.copy()
        if not (plain.dtype.isnative and _IN_TORCH.fullmatch(self.dtype[1:])):
            plain = plain.reshape(-1).view(numpy.uint8)
        return torch.from_numpy(plain)

    def build_array(self, tensor: Any) -> Any:
        """Inverse of `wrap_as_tensor`. Raises FormatError if the form does not fit the tensor."""
        torch = importlib.import_module("torch")
        numpy = importlib.import_module("numpy")
        try:
            flat = tensor.detach().view(-1).view(torch.uint8).numpy()  # no copy: filled later
            array = flat.view(numpy.dtype(self.dtype))
            return array.reshape(self.shape[::-1]).T if self.fortran else array.reshape(self.shape)
        except Exception as error:  # numpy may reject a hostile form in any way
            raise FormatError(f"the form of an array does not fit its tensor ({error})") from None


def _is_fortran(array: Any) -> bool:
    return bool(array.flags.f_contiguous and not array.flags.c_contiguous)


def is_tensor_type(kind: type) -> bool:
    """Whether it is torch's own tensor."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and kind is torch.Tensor


def _to_objects(parts: Any) -> Any:
    shape, items = parts
    sizes = strictjson.as_sizes(shape, "shape")
    if type(items) is not list or math.prod(sizes) != len(items):
        raise ValueError(f"{sizes} is no shape of these objects")
    numpy = importlib.import_module("numpy")
    made = numpy.empty(len(items), object)
    for at, item in enumerate(items):  # numpy would make one array of several lists
        made[at] = item
    return made.reshape(sizes)


def _to_fields(parts: Any) -> Any:
    descr, shape, data = parts
    dtype = importlib.import_module("numpy.lib.format").descr_to_dtype(descr)
    if dtype.names is None or dtype.hasobject or type(data) is not bytes:
        raise ValueError("not an array of fields")
    return _array_of(dtype, shape, data)


def _array_of(dtype: Any, shape: Any, data: bytes) -> Any:
    """An array, or a scalar if `shape` is None."""
    numpy = importlib.import_module("numpy")
    sizes = () if shape is None else strictjson.as_sizes(shape, "shape")
    if not dtype.itemsize or math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    made = numpy.ndarray(sizes, dtype, buffer=bytearray(data) if data else None)
    return made[()] if shape is None else made


def _numpy_parts(value: Any) -> tuple[str, Any] | None:
    numpy: Any = sys.modules["numpy"]
    if "numpy.random" in sys.modules and isinstance(value, numpy.random.BitGenerator):
        return "!numpy.random.BitGenerator", _bit_generator(value, numpy.random)
    if isinstance(value, numpy.dtype) and _NUMPY_DTYPE.fullmatch(value.str):
        return "!numpy.dtype", value.str
    scalar = isinstance(value, numpy.generic)
    if not scalar and type(value) is not numpy.ndarray:
        return None
    shape = None if scalar else list(value.shape)
    if value.dtype.char == "O" and not scalar:
        return "!numpy.objects", [shape, value.reshape(-1).tolist()]
    plain = type(value) in (numpy.ndarray, numpy.void)
    if plain and value.dtype.names is not None and not value.dtype.hasobject:
        descr = importlib.import_module("numpy.lib.format").dtype_to_descr(value.dtype)
        return "!numpy.fields", [descr, shape, value.tobytes()]
    whole = numpy.asarray(value)  # the dtype of an empty string has no size, that of its array has
    if not _NUMPY_DTYPE.fullmatch(whole.dtype.str):
        return None
    fortran = _is_fortran(whole)
    data = base64.b64encode(whole.tobytes("F" if fortran else "C")).decode("ascii")
    return "!numpy.fortran" if fortran else "!numpy", [whole.dtype.str, shape, data]


def _bit_generator(value: Any, numpy: Any) -> list[Any]:
    kind = type(value)
    if kind.__name__ not in _BIT_GENERATORS or kind is not getattr(numpy, kind.__name__):
        raise NotData(f"{kind.__module__}.{kind.__qualname__} is no bit generator of numpy")
    return [kind.__name__, value.state, _seed(value, numpy)]


def _random_state(value: Any) -> list[Any]:
    state = value.get_state(legacy=False)
    return [value._bit_generator, int(state["has_gauss"]), float(state["gauss"])]


def _python_generator(value: random.Random) -> list[Any]:
    version, words, gauss = value.getstate()
    return [version, array("I", words).tobytes(), gauss]


def _torch_generator(value: Any) -> list[Any]:
    state = value.get_state()
    state = state.numpy() if "numpy" in sys.modules else state.tolist()
    return [str(value.device), bytes(state)]


def _tensor(value: Any) -> list[Any] | None:
    torch: Any = sys.modules["torch"]
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
        return None
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    size = plain.numel() * plain.element_size()
    # Not .numpy(): torch works without numpy, and numpy has no bfloat16.
    data = ctypes.string_at(plain.data_ptr(), size) if size else b""
    text = base64.b64encode(data).decode("ascii")
    more: dict[str, Any] = {}
    if strides := strides_with_gaps(value.shape, value.stride()):
        more = {"strides": list(strides)}
    elif order := dim_order(value.shape, value.stride()):
        more = {"order": list(order)}
    more |= {"requires_grad": True} if value.requires_grad else {}
    return [_name(plain.dtype), list(plain.shape), text, *([more] if more else [])]


def _to_numpy(value: Any) -> Any:
    code, shape, text = value
    return _array_of(_to_numpy_dtype(code), shape, base64.b64decode(text, validate=True))


def _to_numpy_dtype(code: Any) -> Any:
    if not _NUMPY_DTYPE.fullmatch(code):
        raise ValueError(f"dtype {code[:80]!r}")
    return importlib.import_module("numpy").dtype(code)


def _to_form(value: Any) -> ArrayForm:
    code, shape, order = value
    if not _NUMPY_DTYPE.fullmatch(code) or order not in ("C", "F"):
        raise ValueError(f"dtype {code[:80]!r}, order {order!r:.80}")
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("not a shape")
    return ArrayForm(code, tuple(shape), order == "F")


def _to_tensor(value: Any) -> Any:
    name, shape, text, *more = value
    torch = importlib.import_module("torch")
    dtype, data = dtype_of(name), base64.b64decode(text, validate=True)
    sizes = strictjson.as_sizes(shape, "shape")
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        made = flat.clone().view(dtype).reshape(sizes)
    else:
        made = torch.empty(sizes, dtype=dtype)
    (options,) = more or [{}]
    if strides := options.get("strides"):
        if strides_with_gaps(sizes, strictjson.as_sizes(strides, "strides")) is None:
            raise ValueError("no strides of its dimensions")
        made = torch.empty_strided(sizes, strides, dtype=dtype).copy_(made)
    elif order := options.get("order"):
        made = torch.empty_permuted(sizes, order, dtype=dtype).copy_(made)
    return made.requires_grad_(options.get("requires_grad") is True)


def dtype_of(name: str) -> Any:
    """torch's dtype of that name. Raises ValueError."""
    torch = importlib.import_module("torch")
    dtype = vars(torch).get(name)  # getattr would import submodules of torch for some names
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name[:80]!r}")
    return dtype


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


_MAX_ENTROPY = 1 << 4096
"""numpy takes long to divide a hostile number that is larger."""

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def _seed(value: Any, numpy: Any) -> Any:
    """The seed from which a bit generator spawns others."""
    seed: Any = getattr(value, "seed_seq", None)
    if type(seed) is not numpy.SeedSequence:
        return None
    key = list(map(int, seed.spawn_key))
    entropy = seed.entropy
    if entropy is not None and type(entropy) is not int:
        entropy = list(map(int, entropy))
    return [entropy, key, int(seed.pool_size), int(seed.n_children_spawned)]


def _to_random(parts: Any) -> random.Random:
    version, words, gauss = parts
    made = random.Random()
    made.setstate((version, tuple(array("I", words)), gauss))
    return made


def _to_torch(parts: Any) -> Any:
    device, state = parts
    torch = importlib.import_module("torch")
    if type(device) is not str or type(state) is not bytes or not state:
        raise TypeError("not a device and a state")
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def _to_bits(parts: Any) -> Any:
    name, state, seed = parts
    if name not in _BIT_GENERATORS:
        raise ValueError("no bit generator of numpy")
    numpy = importlib.import_module("numpy.random")
    if seed is None:
        made = getattr(numpy, name)(0)
    else:
        entropy, key, size, spawned = seed
        words = [*key, *entropy] if type(entropy) is list else [*key, entropy or 0]
        small = all(type(word) is int and 0 <= word < _MAX_ENTROPY for word in words)
        if type(size) is not int or not 4 <= size <= 64 or not small:
            raise ValueError("no seed of numpy")
        sequence = numpy.SeedSequence(
            entropy, spawn_key=tuple(key), pool_size=size, n_children_spawned=spawned
        )
        made = getattr(numpy, name)(sequence)
    made.state = state
    return made


def _to_generator(parts: Any) -> Any:
    (bits,) = parts
    numpy = importlib.import_module("numpy.random")
    if not isinstance(bits, numpy.BitGenerator):
        raise TypeError("no bit generator")
    return numpy.Generator(bits)


def _to_random_state(parts: Any) -> Any:
    bits, has_gauss, gauss = parts
    numpy = importlib.import_module("numpy.random")
    if not isinstance(bits, numpy.BitGenerator):
        raise TypeError("no bit generator")
    made = numpy.RandomState(bits)
    made.set_state({**made.get_state(legacy=False), "has_gauss": has_gauss, "gauss": gauss})
    return made


# --- forms ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ViewForm:
    """A tensor over the memory of another one, the base. `offset_bytes`: from the first element of
    the base; `stride`: in elements of `dtype`, torch's name."""

    dtype: str
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedDefinitionForm:
    """The node is an object that stands in other places, too: there as `SharedAgain`."""

    number: int


@dataclass(frozen=True, slots=True)
class SharedAgain:
    """The object of the node whose `SharedDefinitionForm` has this number."""

    number: int


@dataclass(frozen=True, slots=True)
class ClassForm:
    """The node holds the fields of a dataclass, or the items of a named tuple, of this class."""

    kind: type


@dataclass(frozen=True, slots=True)
class RequiresGradForm:
    """A tensor that requires a gradient; `parameter`: an nn.Parameter."""

    parameter: bool


@dataclass(frozen=True, slots=True)
class SubclassForm:
    """The node holds the tensors in which a tensor of this subclass keeps its values.

    `context`: what else the subclass says of itself, as data; `shape`, `stride`: of the whole. See
    torch.utils._python_dispatch.TensorWithFlatten, the protocol of torch.compile.
    """

    kind: type
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _to_view(parts: Any) -> ViewForm:
    dtype, offset, shape, stride = parts
    dtype_of(dtype)
    sizes, steps = strictjson.as_sizes(shape, "shape"), strictjson.as_sizes(stride, "stride")
    if type(offset) is not int or offset < 0 or len(sizes) != len(steps):
        raise ValueError("no view")
    return ViewForm(dtype, offset, sizes, steps)


def _to_grad(parameter: Any) -> RequiresGradForm:
    if type(parameter) is not bool:
        raise TypeError("not true or false")
    return RequiresGradForm(parameter)


def _to_class(parts: Any) -> ClassForm:
    module, name = parts
    return ClassForm(load_class_by_name(module, name))


def _to_subclass(parts: Any) -> SubclassForm:
    module, name, context, shape, stride = parts
    kind = _find(module, name)
    if not issubclass(kind, _class("torch.Tensor")) or not hasattr(kind, "__tensor_unflatten__"):
        raise ValueError(f"{module}.{name} keeps no values in other tensors")
    sizes, steps = strictjson.as_sizes(shape, "shape"), strictjson.as_sizes(stride, "stride")
    return SubclassForm(kind, context, sizes, steps)


def _to_shared(value: Any) -> SharedDefinitionForm:
    if type(value) is not int:
        raise TypeError("not a number")
    return SharedDefinitionForm(value)


def _to_again(value: Any) -> SharedAgain:
    return SharedAgain(_to_shared(value).number)


def _array_parts(form: ArrayForm) -> list[Any]:
    return [form.dtype, list(form.shape), "F" if form.fortran else "C"]


def _view_parts(form: ViewForm) -> list[Any]:
    return [form.dtype, form.offset_bytes, list(form.shape), list(form.stride)]


def _subclass_parts(form: SubclassForm) -> list[Any]:
    return [*name_of(form.kind), form.context, list(form.shape), list(form.stride)]


def _timedelta(value: Any) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _timezone(value: Any) -> list[Any]:
    return list(value.__getinitargs__())


def _generator(value: Any) -> list[Any]:
    return [value.bit_generator]


def _to_size(sizes: Any) -> Any:
    return _class("torch.Size")(strictjson.as_array(sizes, "size"))


_OWN = f"{__name__}."


def _range(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


KINDS = (
    Codec("!array", _OWN + "ArrayForm", _array_parts, _to_form),
    Codec("!view", _OWN + "ViewForm", _view_parts, _to_view),
    Codec("!grad", _OWN + "RequiresGradForm", attrgetter("parameter"), _to_grad),
    Codec("!shared", _OWN + "SharedDefinitionForm", attrgetter("number"), _to_shared),
    Codec("!again", _OWN + "SharedAgain", attrgetter("number"), _to_again),
    Codec("!subclass", _OWN + "SubclassForm", _subclass_parts, _to_subclass),
    Codec("!class", _OWN + "ClassForm", lambda form: list(name_of(form.kind)), _to_class),
    Codec("!datetime", "datetime.datetime", _clock, partial(_to_clock, datetime.datetime)),
    Codec("!time", "datetime.time", _clock, partial(_to_clock, datetime.time)),
    Codec("!date", "datetime.date", datetime.date.isoformat, datetime.date.fromisoformat),
    Codec("!timedelta", "datetime.timedelta", _timedelta, _to_timedelta),
    Codec("!timezone", "datetime.timezone", _timezone, lambda of: datetime.timezone(*_few(of))),
    Codec("!range", "builtins.range", _range, lambda parts: range(*_few(parts))),
    Codec("!slice", "builtins.slice", _range, lambda parts: slice(*_few(parts))),
    Codec("!simplenamespace", "types.SimpleNamespace", _attributes, _to_simple_namespace),
    Codec("!namespace", "argparse.Namespace", _attributes, _to_arguments),
    Codec("!decimal", "decimal.Decimal", str, _to_decimal),
    Codec("!uuid", "uuid.UUID", attrgetter("hex"), _to_uuid),
    Codec("!fraction", "fractions.Fraction", _fraction, _to_fraction),
    Codec("!zoneinfo", "zoneinfo.ZoneInfo", _zone, lambda key: _class("zoneinfo.ZoneInfo")(key)),
    Codec("!random.Random", "random.Random", _python_generator, _to_random),
    Codec("!torch.Tensor", "torch.Tensor", _tensor, _to_tensor),
    Codec("!torch.dtype", "torch.dtype", _name, dtype_of),
    Codec("!torch.Size", "torch.Size", list, _to_size),
    Codec("!torch.device", "torch.device", str, lambda text: _class("torch.device")(text)),
    Codec("!torch.Generator", "torch.Generator", _torch_generator, _to_torch),
    Codec("!numpy.random.Generator", "numpy.random.Generator", _generator, _to_generator),
    Codec("!numpy.random.RandomState", "numpy.random.RandomState", _random_state, _to_random_state),
)
"""Every class whose values are found by their exact type."""

_OF = {(kind.path.partition(".")[0], kind.path.rpartition(".")[2]): kind for kind in KINDS}
_EARLY = {kind.tag: _imported(kind.path) for kind in KINDS}
"""The classes that are there already: another may stand in one's place later (a frozen clock)."""

BUILDERS: dict[str, Callable[[Any], Any]] = {
    **{kind.tag: kind.build for kind in KINDS},
    "!ellipsis": _to_ellipsis,
    "!enum": _to_enum,
    "!flag": _to_flag,
    "!dataclass": _to_object,
    "!namedtuple": _to_object,
    "!numpy": _to_numpy,
    "!numpy.objects": _to_objects,
    "!numpy.fields": _to_fields,
    "!numpy.dtype": _to_numpy_dtype,
    "!numpy.fortran": lambda value: _to_numpy((value[0], value[1][::-1], value[2])).T,
    "!numpy.random.BitGenerator": _to_bits,
}
"""Inverse of `decompose_value`, by tag."""
