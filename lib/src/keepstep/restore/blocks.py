"""Cuts the needed part of a saved box at the borders of a byte range of its image.

A saved box lies in its image row by row, without gaps. The needed rows that lie wholly in the range
make one block. A row that a border cuts is divided in the same way, one dimension further in. So a
range costs a few blocks per dimension, no matter how many separate runs of bytes a column of a
matrix has. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.restore.plan import Piece


class Block(NamedTuple):
    """A saved sub-box that lies wholly in a range of bytes, and the part of it that is needed.

    The sub-box begins at byte `begin` of the image and has the shape `sizes`. The needed part
    begins at `low` and has the shape `extent`. It belongs at `at` in the wanted box.
    """

    begin: int
    sizes: tuple[int, ...]
    low: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]


def blocks(piece: Piece, element_bytes: int, begin: int, end: int) -> Iterator[Block]:
    """The blocks of `piece` in the bytes `[begin, end)` of the image, in byte order.

    Borders fall between elements: a tensor begins at a multiple of its element size.
    """
    return _walk(piece, element_bytes, begin, end, 0, piece.begin)


def byte_range(piece: Piece, element_bytes: int) -> tuple[int, int]:
    """The first needed byte, and the byte after the last needed one."""
    first, last, stride = piece.begin, piece.begin, element_bytes
    for size, low, extent in zip(
        reversed(piece.sizes), reversed(piece.low), reversed(piece.extent), strict=True
    ):
        first += low * stride
        last += (low + extent - 1) * stride
        stride *= size
    return first, last + element_bytes


def _walk(
    piece: Piece, element_bytes: int, begin: int, end: int, depth: int, at_byte: int
) -> Iterator[Block]:
    """The blocks of the sub-box `piece.sizes[depth:]` that begins at `at_byte`."""
    if depth == len(piece.sizes):
        if begin <= at_byte < end:
            yield Block(at_byte, (), (), (), ())
        return
    low, extent = piece.low[depth], piece.extent[depth]
    row = math.prod(piece.sizes[depth + 1 :]) * element_bytes
    first = max(low, -((at_byte - begin) // row))
    last = min(low + extent, (end - at_byte) // row)
    cut = {(begin - at_byte) // row, (end - 1 - at_byte) // row}
    partial = sorted(one for one in cut if low <= one < low + extent and not first <= one < last)
    for one in partial:
        if one < first:
            yield from _inside(piece, element_bytes, begin, end, depth, at_byte, one)
    if first < last:
        yield Block(
            at_byte + first * row,
            (last - first, *piece.sizes[depth + 1 :]),
            (0, *piece.low[depth + 1 :]),
            (last - first, *piece.extent[depth + 1 :]),
            (piece.at[depth] + first - low, *piece.at[depth + 1 :]),
        )
    for one in partial:
        if one >= first:
            yield from _inside(piece, element_bytes, begin, end, depth, at_byte, one)


def _inside(
    piece: Piece, element_bytes: int, begin: int, end: int, depth: int, at_byte: int, row: int
) -> Iterator[Block]:
    """The blocks of one row that a border cuts."""
    step = math.prod(piece.sizes[depth + 1 :]) * element_bytes
    for one in _walk(piece, element_bytes, begin, end, depth + 1, at_byte + row * step):
        yield Block(
            one.begin,
            (1, *one.sizes),
            (0, *one.low),
            (1, *one.extent),
            (piece.at[depth] + row - piece.low[depth], *one.at),
        )
