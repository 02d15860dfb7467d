"""What the image says about one tensor: its name, its true dtype, its box in the global tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

from keepstep.errors import FormatError
from keepstep.steps import Word


class Section(Word):
    """What a tensor is for. A section's digest tells whether that part of a run changes at all."""

    PARAMS = "params"
    OPTIMIZER = "optimizer"
    REST = "rest"


NATIVE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}
"""Element sizes of the dtypes that stock safetensors and torch.distributed.checkpoint read."""

OPAQUE_BYTES = {"C128": 16, "C32": 4, "F8_E8M0": 1, "F4_E2M1_X2": 1}
"""Dtypes that one of them cannot hold: stored as U8, the element's bytes as a last dimension."""

ELEMENT_BYTES = NATIVE_BYTES | OPAQUE_BYTES


Parameters = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and (global) shape of each parameter of an optimizer, in the order of their numbers."""


class TensorSpec(NamedTuple):
    """A tensor of one rank: the box at `offsets` of the tensor `global_shape`, or all of it.

    `dtype` is the true dtype in safetensors' spelling, see `ELEMENT_BYTES`. `dim_order`: the
    dimensions as they lay in the trainer's memory, the outermost first; None for row-major, which
    the image itself always is. `device`: where it lay, `cpu`, `cuda` (the process's own) or
    `cuda:1`; None when the image does not say. `unflattened`: the shape that a vector has where it
    is used, row by row; None for one that is used as it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    section: Section
    offsets: tuple[int, ...] = ()
    global_shape: tuple[int, ...] | None = None
    dim_order: tuple[int, ...] | None = None
    device: str | None = None
    unflattened: tuple[int, ...] | None = None

    @property
    def element_bytes(self) -> int:
        """Raises FormatError for a dtype that the image cannot hold."""
        try:
            return ELEMENT_BYTES[self.dtype]
        except KeyError:
            raise FormatError(f"{self.name}: unknown dtype {self.dtype!r}") from None

    @property
    def size_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def stored_dtype(self) -> str:
        """The dtype that stock readers see."""
        return "U8" if self.dtype in OPAQUE_BYTES else self.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that stock readers see."""
        return (*self.shape, self.element_bytes) if self.dtype in OPAQUE_BYTES else self.shape

    @property
    def stored_offsets(self) -> tuple[int, ...]:
        """The offsets that stock readers see: one a dimension, zeros for a whole tensor."""
        offsets = self.offsets or (0,) * len(self.shape)
        return (*offsets, 0) if self.dtype in OPAQUE_BYTES else offsets


def local_name(name: str, rank: int) -> str:
    """The name to give a tensor that belongs to `rank` alone (an RNG state, a ragged buffer).

    Readers of a step's directory take one name in two shards for one tensor, and join the boxes.
    """
    return f"{name}@rank-{rank:05d}"
