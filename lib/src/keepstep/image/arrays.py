"""Small values of numpy and torch inside the extras: scalars, arrays, dtypes, sizes, devices.

Neither library is imported to write: a value of theirs can only exist once they are. Big tensors
belong into entries of the image of their own, these here are a data loader's or an RNG's state.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import math
import re
import sys
from collections.abc import Callable
from typing import Any

_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUMm]\d{1,6}(\[\d{0,6}[A-Za-z]{1,2}\])?")
_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]{1,30}")


def encode(value: Any) -> dict[str, Any] | None:
    """The tagged form of a value of numpy or torch; None when it has none."""
    library = type(value).__module__.partition(".")[0]
    if library == "numpy" and "numpy" in sys.modules:
        return _from_numpy(value)
    if library == "torch" and "torch" in sys.modules:
        return _from_torch(value)
    return None


def _from_numpy(value: Any) -> dict[str, Any] | None:
    numpy: Any = sys.modules["numpy"]
    scalar = isinstance(value, numpy.generic)
    if not scalar and type(value) is not numpy.ndarray:
        return None
    array = numpy.asarray(value)  # an empty string's own dtype has no size, its array's has
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        return None
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"!numpy": [array.dtype.str, None if scalar else list(array.shape), data]}


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
    return {"!torch.Tensor": [_name(plain.dtype), list(plain.shape), text]}


def _to_numpy(value: Any) -> Any:
    code, shape, text = value
    numpy = importlib.import_module("numpy")
    if not _NUMPY_DTYPE.fullmatch(code):
        raise ValueError(f"dtype {code[:80]!r}")
    dtype, data = numpy.dtype(code), base64.b64decode(text, validate=True)
    sizes = () if shape is None else tuple(shape)
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {sizes} of {dtype}")
    array = numpy.ndarray(sizes, dtype, buffer=bytearray(data) if data else None)
    return array[()] if shape is None else array


def _to_tensor(value: Any) -> Any:
    name, shape, text = value
    torch = importlib.import_module("torch")
    dtype, data = _to_dtype(name), base64.b64decode(text, validate=True)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {shape} of {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.clone().view(dtype).reshape(shape)


def _to_dtype(name: str) -> Any:
    torch = importlib.import_module("torch")
    dtype = getattr(torch, name) if _TORCH_DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name[:80]!r}")
    return dtype


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!numpy": _to_numpy,
    "!torch.Tensor": _to_tensor,
    "!torch.dtype": _to_dtype,
    "!torch.Size": lambda sizes: importlib.import_module("torch").Size(sizes),
    "!torch.device": lambda text: importlib.import_module("torch").device(text),
}
"""Inverse of `encode`, by tag. They raise whatever the libraries raise."""
