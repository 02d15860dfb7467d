"""torch dtypes and their names in the image (safetensors' spelling, see docs/format.md)."""

from __future__ import annotations

import torch

from keepstep.errors import UsageError

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "complex128": "C128",
}

CODE_OF = {getattr(torch, name): code for name, code in _CODES.items() if hasattr(torch, name)}
DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}


def code_of(dtype: torch.dtype, *, name: str) -> str:
    """The name of a dtype in an image. Raises UsageError, naming the tensor, if there is none."""
    try:
        return CODE_OF[dtype]
    except KeyError:
        raise UsageError(f"{name}: tensors of {dtype} cannot be kept") from None
