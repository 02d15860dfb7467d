"""Decides which bytes of which image fill a rank's tensors: pure, and vectorized over all boxes.

A box is `offsets` and `sizes` in a global tensor. The saved boxes of one name are the rows of one
int64 matrix: rank, first byte in the rank's image, offsets, sizes. So millions of boxes take only a
few hundred megabytes, and an intersection is a handful of vector operations.

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

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.errors import CoverageError, few
from keepstep.image import Entry, FlatBox, Layout
from keepstep.steps import make_base_file_name, shard_name

MAX_CELLS = 1 << 24
"""Coverage is counted on the grid of all cuts. A step whose boxes need a finer grid is refused."""


@dataclass(eq=False)
class SavedTensor:
    """One saved tensor.

    `numbers`: the elements of `rows`, one after the other. `dtype`: in the spelling of safetensors.
    `dim_order`, `device`, `strides`: as the first rank with this tensor gives them; see
    `TensorSpec`.

    Treat it as a value. It is not frozen because there are many, and a frozen one takes three times
    as long to make.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    numbers: array[int]
    dim_order: tuple[int, ...] | None = None
    device: str | None = None
    strides: tuple[int, ...] | None = None

    @cached_property
    def box_rows(self) -> Tensor:
        """One row per saved box; the module describes the columns."""
        width = 2 + 2 * len(self.shape)
        if not self.numbers:
            return torch.empty(0, width, dtype=torch.int64)
        return torch.frombuffer(self.numbers, dtype=torch.int64).view(-1, width)

    def only_holder(self, box: Box) -> tuple[int, int] | None:
        """The rank whose image holds `box`, and the first byte there, if `box` is the only saved
        box. Else None."""
        numbers, dims = self.numbers, len(self.shape)
        if len(numbers) != 2 + 2 * dims or tuple(numbers[2:]) != (*box.offsets, *box.sizes):
            return None
        return numbers[0], numbers[1]

    @property
    def box_ranks(self) -> Tensor:
        """For each box, the rank whose image holds it."""
        return self.box_rows[:, 0]

    @property
    def begins(self) -> Tensor:
        """For each box, its first byte in that image."""
        return self.box_rows[:, 1]

    @property
    def box_offsets(self) -> Tensor:
        """The offsets of each box, one column per dimension."""
        return self.box_rows[:, 2 : 2 + len(self.shape)]

    @property
    def box_sizes(self) -> Tensor:
        """The sizes of each box, one column per dimension."""
        return self.box_rows[:, 2 + len(self.shape) :]


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageIndex:
    """What the images of a step hold.

    `absent`: saved ranks without an image. `left_out`: saved ranks whose image exists but was not
    read, because a twin's image was read instead. `aliases`: other names of tied tensors.
    `conflicts`: names that do not mean the same tensor in all shards, with what they mean in which
    shard.
    """

    world: int
    tensors: Mapping[str, SavedTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)

    def find_tensor(self, name: str) -> SavedTensor | None:
        """The tensor of that name, or the tensor that the name is tied to."""
        return self.tensors.get(self.aliases.get(name, name))


class IndexBuilder:
    """Takes one layout after the other, so that their objects need not all be in memory
    together."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._tensors: dict[str, SavedTensor] = {}
        self._aliases: dict[str, str] = {}
        self._conflicts: dict[str, str] = {}
        self._present: set[int] = set()

    def add_image(self, layout: Layout) -> None:
        """Add the image of one saved rank."""
        self._present.add(layout.image_index)
        self._aliases.update(layout.aliases)
        tensors = self._tensors
        for entry in layout.entries.values():
            spec = entry.spec
            name = spec.name if spec.tensor is None else spec.tensor
            shape = spec.whole_shape
            if spec.flat is None:
                at = spec.offsets or (0,) * len(shape)
                row = array("q", (layout.image_index, entry.begin, *at, *spec.shape))
            else:
                row = array("q", _rows_of(spec.flat, entry, layout.image_index))
            saved = tensors.get(name)
            if saved is None:
                how = spec.dim_order, spec.device, spec.strides
                tensors[name] = SavedTensor(name, spec.dtype, shape, row, *how)
            elif (saved.dtype, saved.shape) == (spec.dtype, shape):
                saved.numbers.extend(row)
            else:
                self._conflict(saved, spec.dtype, shape, layout.image_index)

    def build(self, left_out: tuple[int, ...] = ()) -> ImageIndex:
        """The index. Nothing may be added afterwards."""
        return ImageIndex(
            world=self._world,
            tensors=self._tensors,
            aliases=self._aliases,
            absent=tuple(sorted(set(range(self._world)).difference(self._present, left_out))),
            left_out=left_out,
            conflicts=self._conflicts,
        )

    def _conflict(self, saved: SavedTensor, dtype: str, shape: tuple[int, ...], rank: int) -> None:
        meanings = [
            f"{dtype}{list(shape)} in {image_file_name(rank, self._world)}"
            for dtype, shape, rank in (
                (saved.dtype, saved.shape, saved.numbers[0] if saved.numbers else rank),
                (dtype, shape, rank),
            )
        ]
        self._conflicts.setdefault(saved.name, " but ".join(meanings))


def _rows_of(flat: FlatBox, entry: Entry, number: int) -> Iterator[int]:
    """The numbers of `SavedTensor` for all boxes of a range of elements."""
    spec, at = entry.spec, entry.begin
    begin = spec.offsets[-1] if spec.offsets else 0
    if flat.shape and not math.prod(spec.shape):  # a row of no element: of a scalar there is none
        yield from (number, at, *flat.offsets, *[0] * len(flat.shape))
    for offsets, sizes in flat.boxes(begin, math.prod(spec.shape)):
        yield from (number, at, *offsets, *sizes)
        at += math.prod(sizes) * spec.element_bytes


def image_file_name(number: int, world: int) -> str:
    """The name of the file with an image (`Layout.number`), for messages."""
    return (
        shard_name(number, world) if number < world else make_base_file_name(number - world, world)
    )


class Box(NamedTuple):
    """A box of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def empty(self) -> bool:
        """Whether it holds no element."""
        return 0 in self.sizes


def intersect_boxes(saved: SavedTensor, box: Box) -> tuple[Tensor, Tensor, Tensor]:
    """The row numbers of saved boxes that share elements with `box`, and the corners of each shared
    part: `[low, high)` in the global tensor."""
    low = torch.tensor(box.offsets, dtype=torch.int64)
    high = low + torch.tensor(box.sizes, dtype=torch.int64)
    lows = torch.maximum(saved.box_offsets, low)
    highs = torch.minimum(saved.box_offsets + saved.box_sizes, high)
    hit = (highs > lows).all(1).nonzero().squeeze(1)
    return hit, lows[hit], highs[hit]


class BoxCoverage(NamedTuple):
    """How many boxes hold each cell of the grid of all cuts. `cuts`: ascending, per dimension."""

    cuts: tuple[Tensor, ...]
    counts: Tensor

    @property
    def complete(self) -> bool:
        """Whether every element is held."""
        return bool((self.counts > 0).all())

    @property
    def has_no_overlap(self) -> bool:
        """Whether no element is held twice."""
        return bool((self.counts <= 1).all())

    @property
    def is_evenly_covered(self) -> bool:
        """Whether every element is held equally often, as by whole replicas."""
        return bool((self.counts == self.counts.flatten()[0]).all())

    def gaps(self) -> Iterator[Box]:
        """Boxes of cells that no saved box holds, as large as a greedy walk makes them."""
        return self._boxes(self.counts == 0)

    def find_overlapping_boxes(self) -> Iterator[Box]:
        """Boxes of cells that are held more than once."""
        return self._boxes(self.counts > 1)

    def _boxes(self, mask: Tensor) -> Iterator[Box]:
        mask = mask.clone()
        while (cells := mask.nonzero()).numel() or (mask.dim() == 0 and bool(mask)):
            corner = cells[0].tolist() if mask.dim() else []
            extent = _grow(mask, corner)
            mask[tuple(slice(a, a + n) for a, n in zip(corner, extent, strict=True))] = False
            low = [int(cut[a]) for cut, a in zip(self.cuts, corner, strict=True)]
            high = [int(cut[a + n]) for cut, a, n in zip(self.cuts, corner, extent, strict=True)]
            yield Box(tuple(low), tuple(h - a for a, h in zip(low, high, strict=True)))


def _grow(mask: Tensor, corner: list[int]) -> list[int]:
    """The extent of the largest box of wanted cells that a walk from `corner` finds."""
    extent = [1] * len(corner)
    for dim in reversed(range(len(corner))):
        while corner[dim] + extent[dim] < mask.shape[dim]:
            place = [slice(a, a + n) for a, n in zip(corner, extent, strict=True)]
            place[dim] = slice(corner[dim] + extent[dim], corner[dim] + extent[dim] + 1)
            if not bool(mask[tuple(place)].all()):
                break
            extent[dim] += 1
    return extent


def count_coverage(lows: Tensor, highs: Tensor, box: Box) -> BoxCoverage | None:
    """Count how often each part of `box` is held by the boxes `[lows, highs)` inside it.

    None if the boxes are cut so irregularly that the grid would have more than `MAX_CELLS`.
    """
    cuts = []
    for dim, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        edges = torch.tensor([at, at + size], dtype=torch.int64)
        cuts.append(torch.unique(torch.cat([lows[:, dim], highs[:, dim], edges])))
    shape = [len(cut) for cut in cuts]
    if torch.Size(shape).numel() > MAX_CELLS:
        return None
    counts = torch.zeros(shape, dtype=torch.int32)
    if not shape:
        return BoxCoverage((), counts + len(lows))
    places = [
        tuple(torch.searchsorted(cut, edge[:, dim].contiguous()) for edge in (lows, highs))
        for dim, cut in enumerate(cuts)
    ]
    # a box is the cumulative sum, along every dimension, of its corners with alternating signs
    for corner in itertools.product((0, 1), repeat=len(shape)):
        sign = torch.full((len(lows),), (-1) ** sum(corner), dtype=torch.int32)
        edges_at = tuple(places[dim][side] for dim, side in enumerate(corner))
        counts.index_put_(edges_at, sign, accumulate=True)
    for dim in range(len(shape)):
        counts = counts.cumsum(dim, dtype=torch.int32)
    return BoxCoverage(tuple(cuts), counts[tuple(slice(0, -1) for _ in shape)])


_SHOWN = 20
_RANKS_SHOWN = 8


class TensorRequest(NamedTuple):
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
    box number `request`.
    """

    rank: int
    begin: int
    request: int
    sizes: tuple[int, ...]
    low: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FillPlan:
    """All pieces of a plan: the `wholes`, each exactly one saved box of an image in memory (a rank
    that goes on from its own image has no others), and the rows of `columns`.

    A row has rank, begin, want, and then the four tuples of `Piece`, each padded in front to `dims`
    numbers. Rows are sorted by rank and begin, which is the order of the files. This order is the
    same on all ranks, so the ranks of a node can share what they read.
    """

    requests: Sequence[TensorRequest]
    columns: Tensor
    dims: int
    wholes: Sequence[Piece] = ()

    def pieces(self) -> Iterator[Piece]:
        """All pieces."""
        yield from self.wholes
        yield from self.iterate_partial_pieces()

    def iterate_partial_pieces(self) -> Iterator[Piece]:
        """The rows as objects, made on demand."""
        for rows in self.columns.split(4096):
            for row in rows.tolist():
                dims = len(self.requests[row[2]].box.sizes)
                ends = [3 + (part + 1) * self.dims for part in range(4)]
                yield Piece(*row[:3], *(tuple(row[end - dims : end]) for end in ends))


def make_fill_plan(
    requests: Sequence[TensorRequest],
    index: ImageIndex,
    *,
    rank: int,
    nearness: Sequence[int],
    reader: int | None = None,
) -> FillPlan:
    """The plan of running rank `rank`.

    `nearness`: per saved rank; lower is nearer, 0 is in memory. `reader`: the rank whose order
    among equal boxes all ranks of this node use; None for this rank. Raises CoverageError, which
    names every box that no image holds, that overlaps another, or that has contradictory meanings.
    """
    planner = _Planner(index, rank, rank if reader is None else reader, nearness)
    for number, request in enumerate(requests):
        planner.add(number, request)
    planner.raise_problems()
    if not planner.rows:
        return FillPlan(requests, torch.empty(0, 3, dtype=torch.int64), 0, planner.wholes)
    dims = max(len(request.box.sizes) for request in requests)
    joined = torch.cat([_padded(rows, dims) for rows in planner.rows])
    order = joined[:, 1].argsort(stable=True)
    order = order[joined[:, 0][order].argsort(stable=True)]
    return FillPlan(requests, joined[order], dims, planner.wholes)


def _padded(rows: Tensor, dims: int) -> Tensor:
    own = (rows.shape[1] - 3) // 4
    wide = torch.zeros(len(rows), 3 + 4 * dims, dtype=torch.int64)
    wide[:, :3] = rows[:, :3]
    parts = wide[:, 3:].view(len(rows), 4, dims)
    parts[:, :, dims - own :] = rows[:, 3:].view(len(rows), 4, own)
    return wide


class _Planner:
    def __init__(self, index: ImageIndex, rank: int, reader: int, nearness: Sequence[int]) -> None:
        self.rows: list[Tensor] = []
        self.wholes: list[Piece] = []
        self._nearness = nearness
        self._index = index
        self._rank, self._reader = rank, reader
        self._problems: list[str] = []

    @cached_property
    def _order(self) -> Tensor:
        """For each saved rank, its priority: the lowest is read."""
        world = self._index.world
        turn = (torch.arange(len(self._nearness), dtype=torch.int64) - self._reader) % world
        return torch.tensor(self._nearness, dtype=torch.int64) * world + turn

    @cached_property
    def _own_order(self) -> Tensor:
        order = self._order.clone()
        order[self._rank % self._index.world] = -1
        return order

    def add(self, number: int, request: TensorRequest) -> None:
        if request.box.empty:
            return
        saved = self._index.find_tensor(request.name)
        if saved is None:
            self._problems.append(f"{request.name}: no image holds it")
            return
        if saved.name in self._index.conflicts:
            self._problems.append(f"{saved.name}: {self._index.conflicts[saved.name]}")
            return
        only = saved.only_holder(request.box)
        if only is not None and not self._nearness[only[0]]:
            whole, at = request.box.sizes, (0,) * len(request.box.sizes)
            self.wholes.append(Piece(*only, number, whole, at, whole, at))
            return
        hit, lows, highs = intersect_boxes(saved, request.box)
        order = (self._own_order if request.own else self._order)[saved.box_ranks[hit]]
        keep = _distinct(saved, hit, order)
        sizes = torch.tensor(request.box.sizes, dtype=torch.int64)
        if len(keep) != 1 or not bool((highs[keep][0] - lows[keep][0] == sizes).all()):
            checked = self._check(saved, request.box, hit, lows, highs, keep)
            if checked is None:
                return
            keep = checked
        self.rows.append(_rows(saved, number, request.box, hit[keep], lows[keep], highs[keep]))

    def raise_problems(self) -> None:
        if not self._problems:
            return
        raise CoverageError(
            "the images of this step do not make up its tensors, nothing was changed:\n  "
            + few(self._problems, _SHOWN, by="\n  ", rest="\n  ... and ")
            + _absent(self._index)
        )

    def _check(
        self, saved: SavedTensor, box: Box, hit: Tensor, lows: Tensor, highs: Tensor, keep: Tensor
    ) -> Tensor | None:
        """Those of `keep` that are needed; None after noting a problem."""
        found = count_coverage(lows[keep], highs[keep], box)
        if found is None:
            self._problems.append(f"{saved.name}: {len(keep)} boxes without any order")
            return None
        if not found.complete:
            missing = few(list(map(_named, found.gaps())), _SHOWN, by="; ", rest="; and ")
            self._problems.append(f"{saved.name}: no rank holds {missing}")
            return None
        if found.has_no_overlap:
            return keep
        everyone = count_coverage(lows, highs, box)
        if everyone is None or not (everyone.is_evenly_covered or self._index.absent):
            self._overlap(saved, hit, lows, highs, keep, next(found.find_overlapping_boxes()))
            return None
        return _needed(found, lows, highs, keep)

    def _overlap(
        self, saved: SavedTensor, hit: Tensor, lows: Tensor, highs: Tensor, keep: Tensor, box: Box
    ) -> None:
        low = torch.tensor(box.offsets, dtype=torch.int64)
        inside = keep[((lows[keep] <= low) & (low < highs[keep])).all(1)]
        ranks = saved.box_ranks[hit[inside]].tolist()
        files = " and ".join(
            image_file_name(rank, self._index.world) for rank in ranks[:_RANKS_SHOWN]
        )
        self._problems.append(f"{saved.name}: {_named(box)} is in {files}: these boxes overlap")


def _distinct(saved: SavedTensor, hit: Tensor, order: Tensor) -> Tensor:
    """Of equal boxes, the first in `order`. Returns positions in `hit`, ascending in `order`."""
    ordered = order.argsort(stable=True)
    if len(hit) < 2:
        return ordered
    boxes = saved.box_rows[hit[ordered]][:, 2:]
    if not boxes.shape[1]:
        return ordered[:1]
    _, groups = torch.unique(boxes, dim=0, return_inverse=True)
    first = torch.full((int(groups.max()) + 1,), len(hit), dtype=torch.int64)
    first.scatter_reduce_(0, groups, torch.arange(len(hit)), "amin")
    return ordered[first.sort().values]


def _needed(found: BoxCoverage, lows: Tensor, highs: Tensor, keep: Tensor) -> Tensor:
    """As many of the overlapping boxes, in their order, as are needed to hold everything."""
    left = torch.ones_like(found.counts, dtype=torch.bool)
    chosen = []
    for row in keep.tolist():
        place = tuple(
            slice(int(torch.searchsorted(cut, low)), int(torch.searchsorted(cut, high)))
            for cut, low, high in zip(found.cuts, lows[row], highs[row], strict=True)
        )
        if bool(left[place].any()):
            left[place] = False
            chosen.append(row)
    return torch.tensor(chosen, dtype=torch.int64)


def _rows(
    saved: SavedTensor, number: int, box: Box, hit: Tensor, lows: Tensor, highs: Tensor
) -> Tensor:
    head = torch.stack(
        [saved.box_ranks[hit], saved.begins[hit], torch.full((len(hit),), number)], dim=1
    )
    low = lows - saved.box_offsets[hit]
    at = lows - torch.tensor(box.offsets, dtype=torch.int64)
    return torch.cat([head, saved.box_sizes[hit], low, highs - lows, at], dim=1)


def _named(box: Box) -> str:
    return f"offsets {list(box.offsets)}, sizes {list(box.sizes)}"


def _absent(index: ImageIndex) -> str:
    if not index.absent:
        return ""
    files = few([shard_name(rank, index.world) for rank in index.absent], _RANKS_SHOWN)
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


class NeededSubBox(NamedTuple):
    """A saved sub-box that lies wholly in a range of bytes, and the part of it that is needed.

    The sub-box begins at byte `begin` of the image and has the shape `sizes`. The needed part
    begins at `low` and has the shape `extent`. It belongs at `at` in the wanted box.
    """

    begin: int
    sizes: tuple[int, ...]
    low: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]


def blocks_in_range(
    piece: Piece, element_bytes: int, begin: int, end: int
) -> Iterator[NeededSubBox]:
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
) -> Iterator[NeededSubBox]:
    """The blocks of the sub-box `piece.sizes[depth:]` that begins at `at_byte`."""
    if depth == len(piece.sizes):
        if begin <= at_byte < end:
            yield NeededSubBox(at_byte, (), (), (), ())
        return
    low, extent = piece.low[depth], piece.extent[depth]
    row = math.prod(piece.sizes[depth + 1 :]) * element_bytes
    first = max(low, -((at_byte - begin) // row))
    last = min(low + extent, (end - at_byte) // row)
    cut = {(begin - at_byte) // row, (end - 1 - at_byte) // row}
    partial = sorted(
        cell for cell in cut if low <= cell < low + extent and not first <= cell < last
    )
    for cell in partial:
        if cell < first:
            yield from _inside(piece, element_bytes, begin, end, depth, at_byte, cell)
    if first < last:
        yield NeededSubBox(
            at_byte + first * row,
            (last - first, *piece.sizes[depth + 1 :]),
            (0, *piece.low[depth + 1 :]),
            (last - first, *piece.extent[depth + 1 :]),
            (piece.at[depth] + first - low, *piece.at[depth + 1 :]),
        )
    for cell in partial:
        if cell >= first:
            yield from _inside(piece, element_bytes, begin, end, depth, at_byte, cell)


def _inside(
    piece: Piece, element_bytes: int, begin: int, end: int, depth: int, at_byte: int, row: int
) -> Iterator[NeededSubBox]:
    """The blocks of one row that a border cuts."""
    step = math.prod(piece.sizes[depth + 1 :]) * element_bytes
    for block in _walk(piece, element_bytes, begin, end, depth + 1, at_byte + row * step):
        yield NeededSubBox(
            block.begin,
            (1, *block.sizes),
            (0, *block.low),
            (1, *block.extent),
            (piece.at[depth] + row - piece.low[depth], *block.at),
        )
