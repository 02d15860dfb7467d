"""What an image says about one tensor: its name, its true dtype, its box in the global tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from keepstep.errors import FormatError
from keepstep.steps import StrEnum


class TensorRole(StrEnum):
    """What a tensor is for. A section's digest shows whether that part of the state changes from
    step to step."""

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
"""Element sizes of the dtypes that one of these two cannot read. Such a tensor is stored as U8,
with the bytes of an element as a last dimension."""

ELEMENT_BYTES = NATIVE_BYTES | OPAQUE_BYTES


Parameters = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and (global) shape of each parameter of an optimizer, in the order of the optimizer's
parameter numbers."""


class FlatBox(NamedTuple):
    """A box of a tensor of shape `shape`, whose elements, row by row, are one vector."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def boxes(self, begin: int, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the boxes of the tensor that the elements `[begin, begin + count)`
        of the vector make up, in their order: fewer than two for each dimension."""
        for offsets, sizes in _boxes(self.sizes, begin, begin + count):
            yield tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), sizes


def _boxes(
    sizes: Sequence[int], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if begin == end:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        yield from _in_row(sizes, last, begin, end)
        return
    yield from _in_row(sizes, first - 1, begin, first * row)
    if first < last:
        yield (first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])
    yield from _in_row(sizes, last, last * row, end)


def _in_row(
    sizes: Sequence[int], at: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    row = math.prod(sizes[1:])
    for offsets, inner in _boxes(sizes[1:], begin - at * row, end - at * row):
        yield (at, *offsets), (1, *inner)


class TensorSpec(NamedTuple):
    """A tensor of one rank: a box at `offsets` in a tensor of shape `global_shape`, or a whole
    tensor (no `offsets`, `global_shape` None).

    `shape`: of the box. `dtype`: the true dtype in safetensors' spelling, see `ELEMENT_BYTES`.
    `dim_order`: the order of the dimensions in the trainer's memory, outermost first; None for
    row-major. `strides`: in elements, of a tensor with gaps between its elements, such as a column
    of a matrix; None for a dense one. In the image itself a tensor is always row-major. `device`:
    where the tensor was: `cpu`, `cuda` (the process's own device) or `cuda:1`; None if the image
    does not say.
    `unflattened`: the shape with which the tensor is used, in row-major order; None if it is used
    as it is. `tensor`: the name of the tensor, where it is not the entry's,
    because one rank has several boxes of it. `flat`: the box of a tensor of which this is a range
    of elements, from its last offset on; then `offsets` and `global_shape` are in a tensor whose
    rows are such vectors.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    section: TensorRole
    offsets: tuple[int, ...] = ()
    global_shape: tuple[int, ...] | None = None
    dim_order: tuple[int, ...] | None = None
    device: str | None = None
    unflattened: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    tensor: str | None = None
    flat: FlatBox | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        if self.flat is not None:
            return self.flat.shape
        return self.shape if self.global_shape is None else self.global_shape

    @property
    def element_bytes(self) -> int:
        """Bytes of one element. Raises FormatError for a dtype that the image cannot hold."""
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
        """The offsets that stock readers see: one for each dimension, zeros for a whole tensor."""
        offsets = self.offsets or (0,) * len(self.shape)
        return (*offsets, 0) if self.dtype in OPAQUE_BYTES else offsets


def dim_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The order of the dimensions in memory, the outermost first; None for row-major.

    Of dimensions with equal strides, the one with more elements is the outer one. So a tensor that
    is made in this order has exactly the same strides, even for dimensions of one element, by which
    torch tells its memory formats apart.
    """
    if len(strides) < 2 or (len(strides) == 2 and strides[0] > strides[1]):
        return None
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))
    return None if order == list(range(len(shape))) else tuple(order)


def strides_with_gaps(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a tensor whose elements lie apart, each in a place of its own, or of one
    without elements that are not the usual ones. None for any other tensor, and if most of its
    memory would be gaps."""
    count = math.prod(shape)
    if not count:
        return None if tuple(strides) == _usual(shape) else tuple(strides)
    extent = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < extent:
            return None
        extent += (size - 1) * stride
    return tuple(strides) if count < extent <= _MOST_GAPS * count + _SMALL_EXTENT else None


def _usual(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor without elements, as torch makes them."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


_MOST_GAPS = 4
_SMALL_EXTENT = 4096


def add_rank_suffix(name: str, rank: int) -> str:
    """The name to give a tensor that belongs to `rank` alone (an RNG state, a ragged buffer).

    Tensors of one name in two shards would be taken for one tensor: readers of a step's directory
    join their boxes.
    """
    return f"{name}@rank-{rank:05d}"


def split_local_name(name: str) -> tuple[str, int | None]:
    """A stored name without its rank, and the rank if the name has one: inverse of
    `add_rank_suffix`."""
    match = _LOCAL.match(name) if _MARK in name else None
    return (match[1], int(match[2])) if match else (name, None)


_MARK = "@rank-"
_LOCAL = re.compile(r"^(.*)@rank-(\d{5,})$", re.DOTALL)
