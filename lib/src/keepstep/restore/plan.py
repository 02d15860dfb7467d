"""Decides which bytes of which image fill a rank's tensors. Pure, and vectorized over the saved
boxes.

Every wanted box is intersected with the saved boxes of its name. Equal saved boxes (of twins or
replicas) hold equally good values, so the nearest is taken. Among equally near ones, each node
begins its search at another rank. This spreads the load, and yet all ranks of a node read the same
images.

Boxes that overlap without being equal are refused unless every element is held equally often. In
that case they are whole replicas that different nodes cut differently, and any of them will do. If
images are absent, this can no longer be checked, and the overlap is taken for such a replica.

Nothing is copied here. Any plan that is returned covers every wanted element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.errors import CoverageError, few
from keepstep.restore.boxes import Box, Coverage, Index, Saved, cover, intersect
from keepstep.steps import shard_name

_SHOWN = 20
_RANKS_SHOWN = 8


class Want(NamedTuple):
    """A box to fill.

    `own`: prefer the value of the same rank to an equal box of another rank. This is for buffers,
    which differ a little between replicas.
    """

    name: str
    box: Box
    own: bool = False


class Piece(NamedTuple):
    """A part of one saved box, and its place in a wanted box.

    The saved box has the shape `sizes` and begins at byte `begin` of the image of `rank`. The part
    begins at `low` in the saved box and has the shape `extent`. It belongs at `at` in the wanted
    box number `want`.
    """

    rank: int
    begin: int
    want: int
    sizes: tuple[int, ...]
    low: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]


class Whole(NamedTuple):
    """A want that is exactly one saved box of an image in memory.

    This is the simplest piece. If a rank goes on from its own image, all its pieces are like this.
    """

    rank: int
    begin: int
    want: int


@dataclass(frozen=True, eq=False)
class Plan:
    """All pieces of a plan: the `wholes`, and the rows of `columns`.

    A row has rank, begin, want, and then the four tuples of `Piece`, each padded in front to `dims`
    numbers. Rows are sorted by rank and begin, which is the order of the files. This order is the
    same on all ranks, so the ranks of a node can share what they read.
    """

    wants: Sequence[Want]
    columns: Tensor
    dims: int
    wholes: Sequence[Whole] = ()

    def pieces(self) -> Iterator[Piece]:
        """All pieces."""
        for rank, begin, want in self.wholes:
            sizes = self.wants[want].box.sizes
            at = (0,) * len(sizes)
            yield Piece(rank, begin, want, sizes, at, sizes, at)
        yield from self.parts()

    def parts(self) -> Iterator[Piece]:
        """The rows as objects, made on demand."""
        for rows in self.columns.split(4096):
            for row in rows.tolist():
                yield self._piece(row)

    def _piece(self, row: list[int]) -> Piece:
        dims = len(self.wants[row[2]].box.sizes)
        parts = (
            tuple(row[3 + (part + 1) * self.dims - dims : 3 + (part + 1) * self.dims])
            for part in range(4)
        )
        return Piece(row[0], row[1], row[2], *parts)


def make(
    wants: Sequence[Want],
    index: Index,
    *,
    rank: int,
    nearness: Sequence[int],
    reader: int | None = None,
) -> Plan:
    """The plan of running rank `rank`.

    `nearness`: per saved rank; lower is nearer, 0 is in memory. `reader`: the rank whose order
    among equal boxes all ranks of this node use; None for this rank. Raises CoverageError, which
    names every box that no image holds, that overlaps another, or that has contradictory meanings.
    """
    planner = _Planner(index, rank, rank if reader is None else reader, nearness)
    for number, want in enumerate(wants):
        planner.add(number, want)
    planner.raise_problems()
    if not planner.rows:
        return Plan(wants, torch.empty(0, 3, dtype=torch.int64), 0, planner.wholes)
    dims = max(len(want.box.sizes) for want in wants)
    joined = torch.cat([_padded(rows, dims) for rows in planner.rows])
    order = joined[:, 1].argsort(stable=True)
    order = order[joined[:, 0][order].argsort(stable=True)]
    return Plan(wants, joined[order], dims, planner.wholes)


def _padded(rows: Tensor, dims: int) -> Tensor:
    own = (rows.shape[1] - 3) // 4
    wide = torch.zeros(len(rows), 3 + 4 * dims, dtype=torch.int64)
    wide[:, :3] = rows[:, :3]
    parts = wide[:, 3:].view(len(rows), 4, dims)
    parts[:, :, dims - own :] = rows[:, 3:].view(len(rows), 4, own)
    return wide


class _Planner:
    def __init__(self, index: Index, rank: int, reader: int, nearness: Sequence[int]) -> None:
        self.rows: list[Tensor] = []
        self.wholes: list[Whole] = []
        self._nearness = nearness
        self._index = index
        self._rank, self._reader = rank, reader
        self._problems: list[str] = []

    @cached_property
    def _order(self) -> Tensor:
        """For each saved rank, its priority: the lowest is read."""
        world = self._index.world
        turn = (torch.arange(world, dtype=torch.int64) - self._reader) % world
        return torch.tensor(self._nearness, dtype=torch.int64) * world + turn

    @cached_property
    def _own_order(self) -> Tensor:
        order = self._order.clone()
        order[self._rank % self._index.world] = -1
        return order

    def add(self, number: int, want: Want) -> None:
        if want.box.empty:
            return
        saved = self._index.find(want.name)
        if saved is None:
            self._problems.append(f"{want.name}: no image holds it")
            return
        if saved.name in self._index.conflicts:
            self._problems.append(f"{saved.name}: {self._index.conflicts[saved.name]}")
            return
        only = saved.only(want.box)
        if only is not None and not self._nearness[only[0]]:
            self.wholes.append(Whole(*only, number))
            return
        hit, lows, highs = intersect(saved, want.box)
        order = (self._own_order if want.own else self._order)[saved.ranks[hit]]
        keep = _distinct(saved, hit, order)
        if len(keep) != 1 or not _fills(lows[keep], highs[keep], want.box):
            checked = self._check(saved, want.box, hit, lows, highs, keep)
            if checked is None:
                return
            keep = checked
        self.rows.append(_rows(saved, number, want.box, hit[keep], lows[keep], highs[keep]))

    def raise_problems(self) -> None:
        if not self._problems:
            return
        raise CoverageError(
            "the images of this step do not make up its tensors, nothing was changed:\n  "
            + few(self._problems, _SHOWN, by="\n  ", rest="\n  ... and ")
            + _absent(self._index)
        )

    def _check(
        self, saved: Saved, box: Box, hit: Tensor, lows: Tensor, highs: Tensor, keep: Tensor
    ) -> Tensor | None:
        """Those of `keep` that are needed; None after noting a problem."""
        found = cover(lows[keep], highs[keep], box)
        if found is None:
            self._problems.append(f"{saved.name}: {len(keep)} boxes without any order")
            return None
        if not found.complete:
            missing = few(list(map(_named, found.gaps())), _SHOWN, by="; ", rest="; and ")
            self._problems.append(f"{saved.name}: nobody holds {missing}")
            return None
        if found.single:
            return keep
        everyone = cover(lows, highs, box)
        if everyone is None or not (everyone.uniform or self._index.absent):
            self._overlap(saved, hit, lows, highs, keep, next(found.overlaps()))
            return None
        return _needed(found, lows, highs, keep)

    def _overlap(
        self, saved: Saved, hit: Tensor, lows: Tensor, highs: Tensor, keep: Tensor, box: Box
    ) -> None:
        low = torch.tensor(box.offsets, dtype=torch.int64)
        inside = keep[((lows[keep] <= low) & (low < highs[keep])).all(1)]
        ranks = saved.ranks[hit[inside]].tolist()
        files = " and ".join(shard_name(one, self._index.world) for one in ranks[:_RANKS_SHOWN])
        self._problems.append(f"{saved.name}: {_named(box)} is in {files}: these boxes overlap")


def _distinct(saved: Saved, hit: Tensor, order: Tensor) -> Tensor:
    """Of equal boxes, the first in `order`. Returns positions in `hit`, ascending in `order`."""
    ordered = order.argsort(stable=True)
    if len(hit) < 2:
        return ordered
    boxes = saved.rows[hit[ordered]][:, 2:]
    if not boxes.shape[1]:
        return ordered[:1]
    _, groups = torch.unique(boxes, dim=0, return_inverse=True)
    first = torch.full((int(groups.max()) + 1,), len(hit), dtype=torch.int64)
    first.scatter_reduce_(0, groups, torch.arange(len(hit)), "amin")
    return ordered[first.sort().values]


def _fills(lows: Tensor, highs: Tensor, box: Box) -> bool:
    size = torch.tensor(box.sizes, dtype=torch.int64)
    return bool((highs[0] - lows[0] == size).all())


def _needed(found: Coverage, lows: Tensor, highs: Tensor, keep: Tensor) -> Tensor:
    """As many of the overlapping boxes, in their order, as are needed to hold everything."""
    left = torch.ones_like(found.counts, dtype=torch.bool)
    chosen = []
    for one in keep.tolist():
        place = tuple(
            slice(int(torch.searchsorted(cut, low)), int(torch.searchsorted(cut, high)))
            for cut, low, high in zip(found.cuts, lows[one], highs[one], strict=True)
        )
        if bool(left[place].any()):
            left[place] = False
            chosen.append(one)
    return torch.tensor(chosen, dtype=torch.int64)


def _rows(saved: Saved, number: int, box: Box, hit: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
    head = torch.stack(
        [saved.ranks[hit], saved.begins[hit], torch.full((len(hit),), number)], dim=1
    )
    low = lows - saved.offsets[hit]
    at = lows - torch.tensor(box.offsets, dtype=torch.int64)
    return torch.cat([head, saved.sizes[hit], low, highs - lows, at], dim=1)


def _named(box: Box) -> str:
    return f"offsets {list(box.offsets)}, sizes {list(box.sizes)}"


def _absent(index: Index) -> str:
    if not index.absent:
        return ""
    files = few([shard_name(one, index.world) for one in index.absent], _RANKS_SHOWN)
    return (
        f"\nNo image was found of: {files}. Bring back the node or the volume that holds them, or"
        " restore an older step."
    )


# --- pieces cut at the borders of a byte range ------------------------------------------------
#
# A saved box lies in its image row by row, without gaps. The needed rows that lie wholly in the
# range make one block. A row that a border cuts is divided in the same way, one dimension further
# in. So a range costs a few blocks per dimension, no matter how many separate runs of bytes a
# column of a matrix has.


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
