"""What one place holds of one step: a bitmap of ranks, and what was reported of their images.

Of an image only what the ledger asks for is kept: numbers that stand for its digests, and its size.
A value that is the same for all ranks is kept once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import repeat
from typing import Union

from keepstep.core.shard import ShardFacts
from keepstep.steps import Tier

Place = tuple[int, Tier, int]
"""(node rank, tier, world). One place holds at most one image of a rank and step. Images in the
archive belong to no node (`commit_rule.NO_NODE`)."""

Column = Union[int, "array[int]"]
"""A number for each rank that is held, in the order of ranks. A single number while it is the same
for all of them."""

_DIGESTS, _SIZES = "i", "q"
_FEW = 512


def bits(ranks: int) -> Iterator[int]:
    """The ranks in a bitmap, ascending."""
    digits = bin(ranks)[:1:-1]
    rank = digits.find("1")
    while rank >= 0:
        yield rank
        rank = digits.find("1", rank + 1)


def bitmap(ranks: Iterable[int]) -> int:
    """The bitmap of these ranks."""
    found = 0
    for rank in ranks:
        found |= 1 << rank
    return found


def is_full(ranks: int, world: int) -> bool:
    """Whether the bitmap contains all ranks of this world."""
    everybody = (1 << world) - 1
    return ranks & everybody == everybody


class RankUnion:
    """The union of many bitmaps, one for each key. Most changes of one bitmap need no look at the
    others.

    `once`: bits that are in any bitmap. `twice`: bits that are in more than one.
    """

    __slots__ = ("_of", "once", "twice")

    def __init__(self) -> None:
        self.once = self.twice = 0
        self._of: dict[int, int] = {}

    def __getitem__(self, key: int) -> int:
        return self._of.get(key, 0)

    def put(self, key: int, ranks: int) -> None:
        """Replace the bitmap of this key."""
        before = self[key]
        if before == ranks:
            return
        left, came = before & ~ranks, ranks & ~before
        if ranks:
            self._of[key] = ranks
        else:
            del self._of[key]
        if left & self.twice:
            self._add_up()
        else:
            self.once &= ~left
            self._add(came)

    def having(self, rank: int) -> set[int]:
        """The keys of the bitmaps that contain this rank."""
        return {key for key, ranks in self._of.items() if ranks >> rank & 1}

    def _add(self, ranks: int) -> None:
        self.twice |= self.once & ranks
        self.once |= ranks

    def _add_up(self) -> None:
        """Compute both sums anew. When a bit of `twice` goes from one bitmap, the sums do not show
        how many others still have it."""
        self.once = self.twice = 0
        for ranks in self._of.values():
            self._add(ranks)


class Holding:
    """The images of one step at one place.

    `doubled`: ranks of which this one place has two different images. `written_at`: when the last
    image was written, in unix seconds; 0 if no time was reported.
    """

    __slots__ = ("_params", "_roots", "_sizes", "_twins", "doubled", "place", "ranks", "written_at")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ranks = 0
        self.doubled = 0
        self.written_at = 0.0
        self._roots: Column = 0
        self._params: Column = 0
        self._sizes: Column = 0
        self._twins: dict[int, int] | None = None

    def add(self, images: Mapping[int, ShardFacts]) -> None:
        """Add images, by rank. None of these ranks may have an image here yet."""
        ranks = sorted(images)
        told = [images[rank] for rank in ranks]
        roots = [number_of(one.root) for one in told]
        params = [number_of(one.params_digest) for one in told]
        self._roots = _put(self._roots, self.ranks, ranks, roots, _DIGESTS)
        self._params = _put(self._params, self.ranks, ranks, params, _DIGESTS)
        sizes = [one.size_bytes for one in told]
        self._sizes = _put(self._sizes, self.ranks, ranks, sizes, _SIZES)
        self.ranks = _shared(self.ranks | bitmap(ranks))
        self.written_at = max(self.written_at, *(one.written_at or 0.0 for one in told))
        for rank, one in images.items():
            if group := one.alike.bits:
                self._twins = self._twins or {}
                self._twins[group] = self._twins.get(group, 0) | 1 << rank

    def remove(self, ranks: int) -> None:
        """Remove the images of these ranks. Each of them must have one here."""
        for rank in bits(ranks):
            at = _index(self.ranks, rank)
            for column in (self._roots, self._params, self._sizes):
                if not isinstance(column, int):
                    column.pop(at)
            self.ranks &= ~(1 << rank)
        self.doubled &= ~ranks
        if self._twins:
            kept = {group: told & ~ranks for group, told in self._twins.items()}
            self._twins = {group: told for group, told in kept.items() if told} or None

    def is_of(self, rank: int, shard: ShardFacts) -> bool:
        """Whether the image of this rank that is held here is `shard`."""
        at = _index(self.ranks, rank)
        return (
            _get(self._roots, at) == number_of(shard.root)
            and _get(self._params, at) == number_of(shard.params_digest)
            and _get(self._sizes, at) == shard.size_bytes
            and (shard.written_at or 0.0) <= self.written_at
            and not self.doubled >> rank & 1
            and self._group_of(rank) == shard.alike.bits
        )

    def root(self, rank: int) -> int:
        """A number that stands for the digest of the rank's image; 0 if there is no image, or if it
        has no digest."""
        return _get(self._roots, _index(self.ranks, rank)) if self.ranks >> rank & 1 else 0

    @property
    def rooted(self) -> int:
        """All ranks held here if any image may have a digest; 0 if no image has one."""
        return 0 if self._roots == 0 else self.ranks

    def params(self) -> Iterator[tuple[int, int]]:
        """By rank, a number that stands for the digest of the parameters; 0 if there is none."""
        return _by_rank(self.ranks, self._params)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Bytes of each image, by rank."""
        return _by_rank(self.ranks, self._sizes)

    def with_twins(self) -> int:
        """Bitmap of the ranks held here, and of the ranks that have a twin among them."""
        found = self.ranks
        for group in self._twins or ():
            found |= group
        return found

    def _group_of(self, rank: int) -> int:
        for group, told in (self._twins or {}).items():
            if told >> rank & 1:
                return group
        return 0


def number_of(digest: str | None) -> int:
    """A number that stands for a digest; 0 for None.

    The numbers hold within one process only: Python salts `hash` for each process, so nobody can
    choose two digests with one number. 31 bits, because these numbers are most of what is kept of a
    step in the archive.
    """
    return 0 if digest is None else (hash(digest) & 0x7FFFFFFF) or 1


def _index(ranks: int, rank: int) -> int:
    """How many of these ranks are lower than this one: its index in their order."""
    return (ranks & ((1 << rank) - 1)).bit_count()


@lru_cache(maxsize=256)
def _shared(ranks: int) -> int:
    """One object for equal bitmaps: nearly all steps are held of the same ranks."""
    return ranks


def _put(column: Column, there: int, ranks: list[int], values: list[int], kind: str) -> Column:
    """The column of the ranks `there`, with the values of `ranks` (ascending, none `there`) put
    in."""
    if isinstance(column, int):
        same = values[0] if not there else column
        if values.count(same) == len(values):
            return same
        column = array(kind, [column]) * there.bit_count()
    at = _index(there, ranks[0])
    if _index(there, ranks[-1]) == at:
        if len(column) > _FEW:
            column[at:at] = array(kind, values)  # thousands of pods each add a value: no copies
            return column
        return column[:at] + array(kind, values) + column[at:]  # a copy has no spare capacity
    for before, (rank, value) in enumerate(zip(ranks, values, strict=True)):
        column.insert(_index(there, rank) + before, value)
    return column


def _by_rank(ranks: int, column: Column) -> Iterator[tuple[int, int]]:
    return zip(bits(ranks), repeat(column) if isinstance(column, int) else column, strict=False)


def _get(column: Column, at: int) -> int:
    return column if isinstance(column, int) else column[at]
