"""Small values of numpy and torch inside the extras: scalars, arrays, dtypes, sizes, devices.

Encoding imports neither library: their values exist only if the program has imported them. Large
tensors and arrays are separate entries of the image; the small ones here are the state of a data
loader or an RNG. Of a large array, the extras hold what a tensor cannot express: `ArrayForm`.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.errors import FormatError
from keepstep.image import fields
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


def encode(value: Any) -> dict[str, Any] | None:
    """The tagged form of a value of numpy or torch; None if it has none."""
    if type(value) is ArrayForm:
        return {"!array": [value.dtype, list(value.shape), "F" if value.fortran else "C"]}
    library = type(value).__module__.partition(".")[0]
    if library == "numpy" and "numpy" in sys.modules:
        return _from_numpy(value)
    if library == "torch" and "torch" in sys.modules:
        return _from_torch(value)
    return None


def parts_of(value: Any) -> tuple[str, Any] | None:
    """A tag, and simpler values, of an array of objects or of named fields; None for any other."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or type(value) not in (numpy.ndarray, numpy.void):
        return None
    dtype, shape = value.dtype, list(value.shape) if type(value) is numpy.ndarray else None
    if dtype.char == "O" and shape is not None:
        return "!numpy.objects", [shape, value.reshape(-1).tolist()]
    if dtype.names is None or dtype.hasobject:
        return None
    descr = importlib.import_module("numpy.lib.format").dtype_to_descr(dtype)
    return "!numpy.fields", [descr, shape, value.tobytes()]


def _to_objects(parts: Any) -> Any:
    shape, items = parts
    sizes = fields.sizes(shape, "shape")
    if type(items) is not list or math.prod(sizes) != len(items):
        raise ValueError(f"{sizes} is no shape of these objects")
    numpy = importlib.import_module("numpy")
    made = numpy.empty(len(items), object)
    for at, item in enumerate(items):  # numpy would make one array of several lists
        made[at] = item
    return made.reshape(sizes)


def _to_fields(parts: Any) -> Any:
    descr, shape, data = parts
    numpy = importlib.import_module("numpy")
    dtype = importlib.import_module("numpy.lib.format").descr_to_dtype(descr)
    sizes = () if shape is None else fields.sizes(shape, "shape")
    if dtype.names is None or dtype.hasobject or type(data) is not bytes:
        raise ValueError("not an array of fields")
    if not dtype.itemsize or math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    array = numpy.ndarray(sizes, dtype, buffer=bytearray(data) if data else None)
    return array[()] if shape is None else array


def _from_numpy(value: Any) -> dict[str, Any] | None:
    numpy: Any = sys.modules["numpy"]
    if isinstance(value, numpy.dtype) and _NUMPY_DTYPE.fullmatch(value.str):
        return {"!numpy.dtype": value.str}
    scalar = isinstance(value, numpy.generic)
    if not scalar and type(value) is not numpy.ndarray:
        return None
    array = numpy.asarray(value)  # the dtype of an empty string has no size, that of its array has
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        return None
    fortran = _is_fortran(array)
    data = base64.b64encode(array.tobytes("F" if fortran else "C")).decode("ascii")
    shape = None if scalar else list(array.shape)
    return {"!numpy.fortran" if fortran else "!numpy": [array.dtype.str, shape, data]}


def _from_torch(value: Any) -> dict[str, Any] | None:
    torch: Any = sys.modules["torch"]
    kind = type(value)
    if kind is torch.dtype:
        return {"!torch.dtype": _name(value)}
    if kind is torch.Size:
        return {"!torch.Size": list(value)}
    if kind is torch.device:
        return {"!torch.device": str(value)}
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
    return {
        "!torch.Tensor": [_name(plain.dtype), list(plain.shape), text, *([more] if more else [])]
    }


def _order(tensor: Any) -> list[int]:
    """The order of the dimensions in memory, the outermost first."""
    strides, shape = tensor.stride(), tensor.shape
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))


def _to_numpy(value: Any) -> Any:
    code, shape, text = value
    numpy = importlib.import_module("numpy")
    if not _NUMPY_DTYPE.fullmatch(code):
        raise ValueError(f"dtype {code[:80]!r}")
    dtype, data = numpy.dtype(code), base64.b64decode(text, validate=True)
    sizes = () if shape is None else fields.sizes(shape, "shape")
    if not dtype.itemsize or math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    array = numpy.ndarray(sizes, dtype, buffer=bytearray(data) if data else None)
    return array[()] if shape is None else array


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
    sizes = fields.sizes(shape, "shape")
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        made = flat.clone().view(dtype).reshape(sizes)
    else:
        made = torch.empty(sizes, dtype=dtype)
    (told,) = more or [{}]
    if strides := told.get("strides"):
        if strides_with_gaps(sizes, fields.sizes(strides, "strides")) is None:
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


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!numpy": _to_numpy,
    "!numpy.objects": _to_objects,
    "!numpy.fields": _to_fields,
    "!numpy.dtype": _to_numpy_dtype,
    "!numpy.fortran": lambda value: _to_numpy((value[0], value[1][::-1], value[2])).T,
    "!array": _to_form,
    "!torch.Tensor": _to_tensor,
    "!torch.dtype": dtype_of,
    "!torch.Size": lambda sizes: importlib.import_module("torch").Size(fields.array(sizes, "size")),
    "!torch.device": lambda text: importlib.import_module("torch").device(text),
}
"""Inverse of `encode`, by tag. The builders raise whatever the libraries raise."""
