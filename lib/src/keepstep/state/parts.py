"""Who stages which rows of replicated tensors: pure, and the same answer on every rank.

The tensors are laid end to end on one line of bytes, which is cut into equal lengths; each cut is
moved to the nearest row, or to the nearer end of a tensor too small to be worth two headers. So the
parts are disjoint, cover everything, and differ from an equal share by at most one row (or one such
small tensor).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

SMALL_BYTES = 4096
"""Tensors up to this size are never cut."""


@dataclass(frozen=True, slots=True)
class Bulk:
    """A replicated tensor, as far as its bytes matter."""

    shape: tuple[int, ...]
    element_bytes: int

    @property
    def dim(self) -> int:
        """The dimension that is cut: the first of more than one element, so rows are contiguous."""
        return next((dim for dim, size in enumerate(self.shape) if size > 1), 0)

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def row_bytes(self) -> int:
        """What a cut is rounded to."""
        if self.bytes <= SMALL_BYTES:
            return max(1, self.bytes)
        return self.bytes // self.shape[self.dim]


@functools.lru_cache(maxsize=64)
def cut(tensors: tuple[Bulk, ...], sharers: int) -> tuple[tuple[int, ...], ...]:
    """For each tensor `sharers + 1` ascending rows along its `dim`: number i has [i] to [i + 1].

    Every tensor needs at least one dimension.
    """
    total = sum(one.bytes for one in tensors)
    at, rows = 0, []
    for one in tensors:
        places = (total * number // sharers - at for number in range(1, sharers))
        rows.append((0, *(_row(one, place) for place in places), one.shape[one.dim]))
        at += one.bytes
    return tuple(rows)


def _row(bulk: Bulk, place: int) -> int:
    """The row nearest to a place in bytes from the tensor's beginning, which may lie outside."""
    place = min(max(place, 0), bulk.bytes)
    row = (place + bulk.row_bytes // 2) // bulk.row_bytes
    return row if bulk.bytes > SMALL_BYTES else row * bulk.shape[bulk.dim]
