"""Which boxes of a step can be reached, and where.

Boxes are counted by rank, never one by one: twins are ranks whose images have the very same boxes
(`image.Layout.twins`), so that an image of any of them stands for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.ledger.events import NEAREST_FIRST
from keepstep.steps import Tier


class Copy(NamedTuple):
    """One copy of a rank's image."""

    rank: int
    tier: Tier
    twins: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """`tiers`: per rank, the nearest one that holds its image or, of those in `by_twins`, a twin's.
    `lost`: ranks whose boxes nobody holds."""

    tiers: Mapping[int, Tier]
    by_twins: frozenset[int]
    lost: frozenset[int]

    @property
    def world(self) -> int:
        """How many ranks saved the step."""
        return len(self.tiers) + len(self.lost)

    @property
    def whole(self) -> bool:
        """Every box is there."""
        return not self.lost


def spread(copies: Iterable[Copy], *, world: int) -> Coverage:
    """Where each rank of the world finds its boxes."""
    nearest_first = sorted(copies, key=lambda one: NEAREST_FIRST.index(one.tier))
    own = {one.rank: one.tier for one in reversed(nearest_first)}
    missing = set(range(world)) - own.keys()
    twins: dict[int, Tier] = {}
    for one in nearest_first:
        if len(twins) == len(missing):
            break
        twins.update((rank, one.tier) for rank in missing.intersection(one.twins) - twins.keys())
    found = {**twins, **own}
    return Coverage(
        tiers={rank: found[rank] for rank in range(world) if rank in found},
        by_twins=frozenset(twins),
        lost=frozenset(missing - twins.keys()),
    )
