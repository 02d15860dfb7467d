"""Geometry of boxes, and an index of everything that a step's images hold.

A box is `offsets` and `sizes` in a global tensor. The saved boxes of one name are the rows of one
int64 matrix: rank, first byte in the rank's image, offsets, sizes. So millions of boxes take only a
few hundred megabytes, and an intersection is a handful of vector operations. Pure; torch is used
only for its arithmetic.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from keepstep.image import Layout
from keepstep.steps import shard_name

MAX_CELLS = 1 << 24
"""Coverage is counted on the grid of all cuts. A step whose boxes need a finer grid is refused."""


@dataclass(eq=False)
class Saved:
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
    def rows(self) -> Tensor:
        """One row per saved box; the module describes the columns."""
        width = 2 + 2 * len(self.shape)
        return torch.frombuffer(self.numbers, dtype=torch.int64).view(-1, width)

    def only(self, box: Box) -> tuple[int, int] | None:
        """The rank whose image holds `box`, and the first byte there, if `box` is the only saved
        box. Else None.
        """
        numbers, dims = self.numbers, len(self.shape)
        if len(numbers) != 2 + 2 * dims or tuple(numbers[2:]) != (*box.offsets, *box.sizes):
            return None
        return numbers[0], numbers[1]

    @property
    def ranks(self) -> Tensor:
        """For each box, the rank whose image holds it."""
        return self.rows[:, 0]

    @property
    def begins(self) -> Tensor:
        """For each box, its first byte in that image."""
        return self.rows[:, 1]

    @property
    def offsets(self) -> Tensor:
        """The offsets of each box, one column per dimension."""
        return self.rows[:, 2 : 2 + len(self.shape)]

    @property
    def sizes(self) -> Tensor:
        """The sizes of each box, one column per dimension."""
        return self.rows[:, 2 + len(self.shape) :]


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """What the images of a step hold.

    `absent`: saved ranks without an image. `left_out`: saved ranks whose image exists but was not
    read, because a twin's image was read instead. `aliases`: other names of tied tensors.
    `conflicts`: names that do not mean the same tensor in all shards, with what they mean in which
    shard.
    """

    world: int
    tensors: Mapping[str, Saved]
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Saved | None:
        """The tensor of that name, or the tensor that the name is tied to."""
        return self.tensors.get(self.aliases.get(name, name))


class IndexBuilder:
    """Takes one layout after the other, so that their objects need not all be in memory
    together.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._tensors: dict[str, Saved] = {}
        self._aliases: dict[str, str] = {}
        self._conflicts: dict[str, str] = {}
        self._present: set[int] = set()

    def add(self, layout: Layout, tensor_of: Mapping[str, str] | None = None) -> None:
        """Add the image of one saved rank.

        `tensor_of`: the tensor of each entry that is not named after its tensor, for example where
        one rank has several boxes of a tensor.
        """
        self._present.add(layout.rank)
        self._aliases.update(layout.aliases)
        tensors, tensor_of = self._tensors, tensor_of or {}
        for name, entry in layout.entries.items():
            if name in tensor_of:
                name = tensor_of[name]
            spec = entry.spec
            shape = spec.shape if spec.global_shape is None else spec.global_shape
            at = spec.offsets or (0,) * len(shape)
            row = array("q", (layout.rank, entry.begin, *at, *spec.shape))
            saved = tensors.get(name)
            if saved is None:
                how = spec.dim_order, spec.device, spec.strides
                tensors[name] = Saved(name, spec.dtype, shape, row, *how)
            elif (saved.dtype, saved.shape) == (spec.dtype, shape):
                saved.numbers.extend(row)
            else:
                self._conflict(saved, spec.dtype, shape, layout.rank)

    def build(self, left_out: tuple[int, ...] = ()) -> Index:
        """The index. Nothing may be added afterwards."""
        return Index(
            world=self._world,
            tensors=self._tensors,
            aliases=self._aliases,
            absent=tuple(sorted(set(range(self._world)).difference(self._present, left_out))),
            left_out=left_out,
            conflicts=self._conflicts,
        )

    def _conflict(self, saved: Saved, dtype: str, shape: tuple[int, ...], rank: int) -> None:
        meanings = [
            f"{dtype}{list(shape)} in {shard_name(rank, self._world)}"
            for dtype, shape, rank in (
                (saved.dtype, saved.shape, saved.numbers[0]),
                (dtype, shape, rank),
            )
        ]
        self._conflicts.setdefault(saved.name, " but ".join(meanings))


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


def intersect(saved: Saved, box: Box) -> tuple[Tensor, Tensor, Tensor]:
    """The row numbers of saved boxes that share elements with `box`, and the corners of each shared
    part: `[low, high)` in the global tensor.
    """
    low = torch.tensor(box.offsets, dtype=torch.int64)
    high = low + torch.tensor(box.sizes, dtype=torch.int64)
    lows = torch.maximum(saved.offsets, low)
    highs = torch.minimum(saved.offsets + saved.sizes, high)
    hit = (highs > lows).all(1).nonzero().squeeze(1)
    return hit, lows[hit], highs[hit]


class Coverage(NamedTuple):
    """How many boxes hold each cell of the grid of all cuts. `cuts`: ascending, per dimension."""

    cuts: tuple[Tensor, ...]
    counts: Tensor

    @property
    def complete(self) -> bool:
        """Whether every element is held."""
        return bool((self.counts > 0).all())

    @property
    def single(self) -> bool:
        """Whether no element is held twice."""
        return bool((self.counts <= 1).all())

    @property
    def uniform(self) -> bool:
        """Whether every element is held equally often, as by whole replicas."""
        return bool((self.counts == self.counts.flatten()[0]).all())

    def gaps(self) -> Iterator[Box]:
        """Boxes of cells that no saved box holds, as large as a greedy walk makes them."""
        return self._boxes(self.counts == 0)

    def overlaps(self) -> Iterator[Box]:
        """Boxes of cells that are held more than once."""
        return self._boxes(self.counts > 1)

    def _boxes(self, wanted: Tensor) -> Iterator[Box]:
        wanted = wanted.clone()
        while (cells := wanted.nonzero()).numel() or (wanted.dim() == 0 and bool(wanted)):
            corner = cells[0].tolist() if wanted.dim() else []
            extent = _grow(wanted, corner)
            wanted[tuple(slice(a, a + n) for a, n in zip(corner, extent, strict=True))] = False
            low = [int(cut[a]) for cut, a in zip(self.cuts, corner, strict=True)]
            high = [int(cut[a + n]) for cut, a, n in zip(self.cuts, corner, extent, strict=True)]
            yield Box(tuple(low), tuple(h - a for a, h in zip(low, high, strict=True)))


def _grow(wanted: Tensor, corner: list[int]) -> list[int]:
    """The extent of the largest box of wanted cells that a walk from `corner` finds."""
    extent = [1] * len(corner)
    for dim in reversed(range(len(corner))):
        while corner[dim] + extent[dim] < wanted.shape[dim]:
            place = [slice(a, a + n) for a, n in zip(corner, extent, strict=True)]
            place[dim] = slice(corner[dim] + extent[dim], corner[dim] + extent[dim] + 1)
            if not bool(wanted[tuple(place)].all()):
                break
            extent[dim] += 1
    return extent


def cover(lows: Tensor, highs: Tensor, box: Box) -> Coverage | None:
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
        return Coverage((), counts + len(lows))
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
    return Coverage(tuple(cuts), counts[tuple(slice(0, -1) for _ in shape)])
