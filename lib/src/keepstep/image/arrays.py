"""Values of numpy and torch inside the extras: scalars, arrays, dtypes, sizes, devices, and random
generators, also Python's.

Encoding imports neither library: their values exist only if the program has imported them. Large
tensors and arrays are separate entries of the image; the small ones here are the state of a data
loader. Of a large array, the extras hold what a tensor cannot express: `ArrayForm`. A restore hands
a generator that is decoded on to the one that is live (`state.rng.refill`).
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import math
import random
import re
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.errors import FormatError
from keepstep.image import strictjson
from keepstep.image.objects import NotData
from keepstep.image.tensors import strides_with_gaps

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

    def take(self, array: Any) -> Any:
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

    def over(self, tensor: Any) -> Any:
        """Inverse of `take`. Raises FormatError if the form does not fit the tensor."""
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


def is_tensor(kind: type) -> bool:
    """Whether it is torch's own tensor."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and kind is torch.Tensor


def parts_of(value: Any) -> tuple[str, Any] | None:
    """A tag, and simpler values from which `value` can be made again; None for any other type.
    Raises NotData."""
    if type(value) is random.Random:
        version, words, gauss = value.getstate()
        return "!random.Random", [version, array("I", words).tobytes(), gauss]
    library = type(value).__module__.partition(".")[0]
    if library == "numpy" and library in sys.modules:
        return _numpy_parts(value)
    return _torch_parts(value) if library == "torch" and library in sys.modules else None


def _to_objects(parts: Any) -> Any:
    shape, items = parts
    sizes = strictjson.sizes(shape, "shape")
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
    sizes = () if shape is None else strictjson.sizes(shape, "shape")
    if not dtype.itemsize or math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    made = numpy.ndarray(sizes, dtype, buffer=bytearray(data) if data else None)
    return made[()] if shape is None else made


def _numpy_parts(value: Any) -> tuple[str, Any] | None:
    numpy: Any = sys.modules["numpy"]
    if "numpy.random" in sys.modules and (generator := _generator_parts(value, numpy.random)):
        return generator
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


def _generator_parts(value: Any, numpy: Any) -> tuple[str, Any] | None:
    kind = type(value)
    if kind is numpy.Generator:
        return "!numpy.random.Generator", [value.bit_generator]
    if kind is numpy.RandomState:
        state = value.get_state(legacy=False)
        parts = [value._bit_generator, int(state["has_gauss"]), float(state["gauss"])]
        return "!numpy.random.RandomState", parts
    if isinstance(value, numpy.BitGenerator):
        if kind.__name__ not in _BIT_GENERATORS or kind is not getattr(numpy, kind.__name__):
            raise NotData(f"{kind.__module__}.{kind.__qualname__} is no bit generator of numpy")
        return "!numpy.random.BitGenerator", [kind.__name__, value.state, _seed(value, numpy)]
    return None


def _torch_parts(value: Any) -> tuple[str, Any] | None:
    torch: Any = sys.modules["torch"]
    kind = type(value)
    if kind is torch.dtype:
        return "!torch.dtype", _name(value)
    if kind is torch.Size:
        return "!torch.Size", list(value)
    if kind is torch.device:
        return "!torch.device", str(value)
    if kind is torch.Generator:
        state = value.get_state()
        state = state.numpy() if "numpy" in sys.modules else state.tolist()
        return "!torch.Generator", [str(value.device), bytes(state)]
    if kind is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        return None
    if value.is_quantized:
        return None
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    size = plain.numel() * plain.element_size()
    # Not .numpy(): torch works without numpy, and numpy has no bfloat16.
    data = ctypes.string_at(plain.data_ptr(), size) if size else b""
    text = base64.b64encode(data).decode("ascii")
    more: dict[str, Any] = {} if value.is_contiguous() else {"order": _order(value)}
    if strides := strides_with_gaps(value.shape, value.stride()):
        more = {"strides": list(strides)}
    more |= {"requires_grad": True} if value.requires_grad else {}
    parts = [_name(plain.dtype), list(plain.shape), text, *([more] if more else [])]
    return "!torch.Tensor", parts


def _order(tensor: Any) -> list[int]:
    """The order of the dimensions in memory, the outermost first."""
    strides, shape = tensor.stride(), tensor.shape
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))


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
    if type(shape) is not list or not all(type(one) is int and one >= 0 for one in shape):
        raise ValueError("not a shape")
    return ArrayForm(code, tuple(shape), order == "F")


def _to_tensor(value: Any) -> Any:
    name, shape, text, *more = value
    torch = importlib.import_module("torch")
    dtype, data = dtype_of(name), base64.b64decode(text, validate=True)
    sizes = strictjson.sizes(shape, "shape")
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        made = flat.clone().view(dtype).reshape(sizes)
    else:
        made = torch.empty(sizes, dtype=dtype)
    (told,) = more or [{}]
    if strides := told.get("strides"):
        if strides_with_gaps(sizes, strictjson.sizes(strides, "strides")) is None:
            raise ValueError("no strides of its dimensions")
        made = torch.empty_strided(sizes, strides, dtype=dtype).copy_(made)
    elif order := told.get("order"):
        made = torch.empty_permuted(sizes, order, dtype=dtype).copy_(made)
    return made.requires_grad_(told.get("requires_grad") is True)


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


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!numpy": _to_numpy,
    "!numpy.objects": _to_objects,
    "!numpy.fields": _to_fields,
    "!numpy.dtype": _to_numpy_dtype,
    "!numpy.fortran": lambda value: _to_numpy((value[0], value[1][::-1], value[2])).T,
    "!array": _to_form,
    "!torch.Tensor": _to_tensor,
    "!torch.dtype": dtype_of,
    "!torch.Size": lambda sizes: importlib.import_module("torch").Size(
        strictjson.array(sizes, "size")
    ),
    "!torch.device": lambda text: importlib.import_module("torch").device(text),
    "!random.Random": _to_random,
    "!torch.Generator": _to_torch,
    "!numpy.random.BitGenerator": _to_bits,
    "!numpy.random.Generator": _to_generator,
    "!numpy.random.RandomState": _to_random_state,
}
"""Inverse of `parts_of`, by tag. The builders raise whatever the constructors raise."""
