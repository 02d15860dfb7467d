"""A set of ranks as runs of equal distance: what stands in the same place of each node is one run.

So thousands of ranks are told and kept in a few numbers. A set that is told again and again, as
twins are with each image, is kept once (`shared`). Nothing here takes time or memory by a number
that somebody told, but for `bits`, and for going through all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

Run = tuple[int, int, int]
"""First, last, and the distance from one to the next: at least 1."""

MOST_RUNS: Final = 64
"""Of a set that is told as runs; one of more is told as a list."""
MOST_RANKS: Final = 1 << 16
"""The same: it names none from here on."""
_LONGEST_KEPT: Final = 4096
"""A list of which the runs are remembered: the images of one rank name the same."""
_KEPT: Final = 1024
"""Sets: as many as there are different ones in a world, as FSDP within this many ranks has."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """`runs` in ascending order, each after the one before. Raises ValueError for others; of more
    than `MOST_RUNS`, which nobody may tell, it does not look at all."""

    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        before = -1
        for first, last, step in self.runs[:MOST_RUNS]:
            if not before < first <= last or step < 1 or (last - first) % step:
                raise ValueError("ranks that are no runs in ascending order")
            before = last

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """These ranks, in whatever order."""
        those = tuple(ranks)
        return _kept_of(those) if len(those) <= _LONGEST_KEPT else _of(those)

    def __len__(self) -> int:
        return sum((last - first) // step + 1 for first, last, step in self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[int]:
        for first, last, step in self.runs:
            yield from range(first, last + 1, step)

    def __contains__(self, rank: object) -> bool:
        return any(rank in range(first, last + 1, step) for first, last, step in self.runs)

    @property
    def last(self) -> int:
        """The highest; -1 where there is none."""
        return self.runs[-1][1] if self.runs else -1

    @property
    def is_short(self) -> bool:
        """Whether it is told as runs."""
        return len(self.runs) <= MOST_RUNS and self.last < MOST_RANKS

    @property
    def bits(self) -> int:
        """As a bitmap: a bit for each rank up to the last."""
        return _kept_bits(self) if self.is_short else _bits(self)


NOBODY: Final = Ranks()


def _of(ranks: tuple[int, ...]) -> Ranks:
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][2] in (0, rank - runs[-1][1]):
            runs[-1] = [runs[-1][0], rank, rank - runs[-1][1]]
        else:
            runs.append([rank, rank, 0])
    return shared(Ranks(tuple((first, last, step or 1) for first, last, step in runs)))


_kept_of = functools.lru_cache(maxsize=64)(_of)


@functools.lru_cache(maxsize=_KEPT)
def _shared(ranks: Ranks) -> Ranks:
    return ranks


def shared(ranks: Ranks) -> Ranks:
    """An equal one, the same for all that ask."""
    return _shared(ranks) if ranks.is_short else ranks


def _bits(ranks: Ranks) -> int:
    found = 0
    for rank in ranks:
        found |= 1 << rank
    return found


_kept_bits = functools.lru_cache(maxsize=_KEPT)(_bits)
