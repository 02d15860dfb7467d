"""What the copies of one step add up to, counted as they come and go.

A report of one node among hundreds changes a few copies; it must not cost a look at all of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from keepstep.ledger.events import NEAREST_FIRST, Held
from keepstep.steps import Tier

Place = tuple[int, int, Tier]
"""(node rank, rank, tier): what one report replaces. What lies in the archive is no node's."""

K = TypeVar("K")


class Tally:
    """Of one step. `contested`: ranks of which two different images exist."""

    def __init__(self) -> None:
        self.copies: set[tuple[Place, Held]] = set()
        self.worlds: Counter[int] = Counter()
        self.contested: set[int] = set()
        self._ranks: dict[Tier, Counter[int]] = {tier: Counter() for tier in NEAREST_FIRST}
        self._roots: dict[int, Counter[str]] = {}

    def add(self, place: Place, held: Held) -> None:
        """A copy that is not counted yet."""
        self.copies.add((place, held))
        self._count(place, held, +1)

    def remove(self, place: Place, held: Held) -> None:
        """A copy that is counted."""
        self.copies.remove((place, held))
        self._count(place, held, -1)

    def covers_world(self, tier: Tier) -> bool:
        """Copies of one world size, on this tier or a stronger one, are there of all its ranks."""
        if len(self.worlds) != 1:
            return False
        (world,) = self.worlds
        ranks = self._ranks[tier]
        return len(ranks) >= world and ranks.keys() >= set(range(world))

    def _count(self, place: Place, held: Held, by: int) -> None:
        _, rank, tier = place
        _bump(self.worlds, held.world, by)
        for weaker in NEAREST_FIRST[: NEAREST_FIRST.index(tier) + 1]:
            _bump(self._ranks[weaker], rank, by)
        if held.root is not None:
            roots = self._roots.setdefault(rank, Counter())
            _bump(roots, held.root, by)
            if len(roots) > 1:
                self.contested.add(rank)
            else:
                self.contested.discard(rank)


def _bump(counter: Counter[K], key: K, by: int) -> None:
    counter[key] += by
    if not counter[key]:
        del counter[key]
