"""A shard, the value that ledger, inventory, listings and records share; the shards of one step,
as reports name them; and sets of ranks as runs.

Ranks in the same place of each node are one run of equal distance, so a few numbers stand for
thousands of ranks, in messages and in memory. Except for `bits` and iteration, nothing here takes
time or memory in proportion to a number that came in a message.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from keepstep.steps import StepId

T = TypeVar("T")

Run = tuple[int, int, int]
"""First rank, last rank, and the distance from one rank to the next: at least 1."""

MOST_RUNS: Final = 64
"""The most runs of a set that is sent as runs. A set of more runs is not sent."""
MOST_RANKS: Final = 1 << 16
"""Ranks are numbered below this one, in a world and in a set that is sent as runs."""
_KEPT: Final = 1024
"""How many bitmaps are remembered: enough for the different sets of a world in which FSDP spans
this many ranks. The images of one rank have the same twins, and so one bitmap."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A set of ranks. `runs`: in ascending order, each after the one before.

    Raises ValueError for other runs. Only the first `MOST_RUNS` are checked, because no message may
    carry more.
    """

    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        before = -1
        for first, last, step in self.runs[:MOST_RUNS]:
            if not before < first <= last or step < 1 or (last - first) % step:
                raise ValueError("ranks that are no runs in ascending order")
            before = last

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """The set of these ranks, given in any order."""
        runs: list[list[int]] = []
        for rank in sorted(set(ranks)):
            if runs and runs[-1][2] in (0, rank - runs[-1][1]):
                runs[-1] = [runs[-1][0], rank, rank - runs[-1][1]]
            else:
                runs.append([rank, rank, 0])
        return cls(tuple((first, last, step or 1) for first, last, step in runs))

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
    def first(self) -> int:
        """The lowest rank. Raises IndexError if the set is empty."""
        return self.runs[0][0]

    @property
    def last(self) -> int:
        """The highest rank; -1 if the set is empty."""
        return self.runs[-1][1] if self.runs else -1

    @property
    def is_encoded_as_ranges(self) -> bool:
        """Whether the set is sent as runs."""
        return len(self.runs) <= MOST_RUNS and self.last < MOST_RANKS

    @property
    def bits(self) -> int:
        """The set as a bitmap, with a bit for each rank up to the last."""
        return _kept_bits(self) if self.is_encoded_as_ranges else _bits(self)


NO_RANKS: Final = Ranks()


def _bits(ranks: Ranks) -> int:
    found = 0
    for rank in ranks:
        found |= 1 << rank
    return found


_kept_bits = functools.lru_cache(maxsize=_KEPT)(_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One sealed image of one rank, wherever it lies.

    `root`: the digest over its digests, in hex; None in memory. `params_digest`: the digest of its
    section `params`, in hex. `written_at`: unix seconds, from its own control page. `alike`: the
    rank and its twins, all of whose images hold the very same boxes, so that one image is enough to
    restore them all; no ranks if it has no twins. `size_bytes`: bytes of the whole image, 0 if
    unknown. Shards that differ only in `size_bytes` are equal. `base`: the base that it refers to,
    of the step that first referred to it; None if the shard is whole, or in memory.
    """

    step_id: StepId
    rank: int
    world: int
    size_bytes: int = field(default=0, compare=False)
    root: str | None = None
    params_digest: str | None = None
    alike: Ranks = NO_RANKS
    written_at: float | None = None
    base: Shard | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for twins that are no ranks of this world."""
        if self.alike and self.alike.last >= self.world:
            raise ValueError("the twins are invalid")

    @property
    def base_fields(self) -> dict[str, Any]:
        """The fields of a `Shard`, without those that a subclass adds."""
        return {attribute.name: getattr(self, attribute.name) for attribute in fields(Shard)}

    def to_send(self) -> Shard:
        """The shard as messages name it: without its twins if they would take too many runs
        (`Ranks.is_encoded_as_ranges`)."""
        return Shard(
            **self.base_fields | ({} if self.alike.is_encoded_as_ranges else {"alike": NO_RANKS})
        )

    @property
    def is_well_formed(self) -> bool:
        """Whether a message may name it: it is of a rank of its world, and so are its twins."""
        alike = not self.alike or (self.alike.is_encoded_as_ranges and self.rank in self.alike)
        return 0 <= self.rank < self.world <= MOST_RANKS and alike


MOST_BYTES: Final = 1 << 62
"""The ledger keeps 64 bits for the size of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsOfStep:
    """The shards of one step, of some ranks of one world. Who has it knows which ranks.

    `sizes` has one value for each of these ranks, in ascending order, so that a message of few
    bytes never stands for many images. The same goes for `roots`, `params_digests` and `alike`,
    which are empty if no rank has one; see `Shard`. `written_at`: of the last.
    """

    step_id: StepId
    world: int
    sizes: tuple[int, ...]
    roots: tuple[str | None, ...] = ()
    params_digests: tuple[str | None, ...] = ()
    alike: tuple[Ranks, ...] = ()
    written_at: float | None = None

    @classmethod
    def from_shard(cls, shard: Shard) -> ShardsOfStep:
        """The shard of one rank. Twins that take too many runs are left out
        (`Ranks.is_encoded_as_ranges`)."""
        return cls(
            step_id=shard.step_id,
            world=shard.world,
            sizes=(shard.size_bytes,),
            roots=() if shard.root is None else (shard.root,),
            params_digests=() if shard.params_digest is None else (shard.params_digest,),
            alike=(shard.alike,) if shard.alike and shard.alike.is_encoded_as_ranges else (),
            written_at=shard.written_at,
        )

    @classmethod
    def joined(cls, each: Sequence[ShardsOfStep]) -> ShardsOfStep:
        """The shards of all these ranks, from those of each rank alone, in ascending order."""
        return cls(
            step_id=each[0].step_id,
            world=each[0].world,
            sizes=tuple(group.sizes[0] for group in each),
            roots=_column([group.roots for group in each], None),
            params_digests=_column([group.params_digests for group in each], None),
            alike=_column([group.alike for group in each], NO_RANKS),
            written_at=max((group.written_at for group in each if group.written_at), default=None),
        )

    def select_rank_at(self, index: int) -> ShardsOfStep:
        """The shard of one of the ranks alone."""
        return replace(
            self,
            sizes=self.sizes[index : index + 1],
            roots=self.roots[index : index + 1],
            params_digests=self.params_digests[index : index + 1],
            alike=self.alike[index : index + 1],
        )

    def is_well_formed(self, ranks: Ranks) -> bool:
        """Whether a message may name it for these ranks: they are of its world, and each has one
        value in each column, which can be."""
        columns = self.roots, self.params_digests, self.alike
        return (
            len(self.sizes) == len(ranks) > 0
            and ranks.last < self.world <= MOST_RANKS
            and {len(column) for column in columns} <= {0, len(ranks)}
            and 0 <= min(self.sizes) <= max(self.sizes) < MOST_BYTES
            and all(
                not twins
                or (twins.is_encoded_as_ranges and twins.last < self.world and rank in twins)
                for rank, twins in zip(ranks, self.alike, strict=False)
            )
        )


def _column(each: Sequence[tuple[T, ...]], nothing: T) -> tuple[T, ...]:
    """One value for each rank; none at all if no rank has one."""
    return tuple(values[0] if values else nothing for values in each) if any(each) else ()
