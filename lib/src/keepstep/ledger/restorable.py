"""Which steps could be restored, whole, from what can be reached: pure questions over the copies.

This is more than what is committed: a step may be whole by twins alone, after its other replica was
lost with a node. It never makes a commit, and never lets anything be deleted.
"""

from __future__ import annotations

from collections.abc import Collection

from keepstep.ledger.copies import Copies
from keepstep.ledger.coverage import Coverage
from keepstep.ledger.lineage import Lineage
from keepstep.steps import StepId, Tier


def whole(copies: Copies, lineage: Lineage) -> tuple[StepId, ...]:
    """Restorable steps of which every box can be reached somewhere, oldest first.

    A twin has the boxes of a rank, but not its buffers, RNG and extras. So a step in which twins
    stand in for ranks is left out when these ranks have their own images of the newest complete
    step before it nearby: a crash, or the loss of a node with a buddy, goes on from there, exactly,
    at most a few steps back.
    """
    covered = {
        id: coverage
        for id in copies.steps
        if lineage.restorable(id)
        and (coverage := copies.coverage(id)) is not None
        and coverage.whole
    }
    found, complete = [], None
    for id, coverage in covered.items():
        if not coverage.by_twins:
            complete = coverage
        if complete is None or not _nearby(coverage.by_twins, complete, world=coverage.world):
            found.append(id)
    return tuple(found)


def _nearby(ranks: Collection[int], complete: Coverage, *, world: int) -> bool:
    near = (Tier.MEMORY, Tier.LOCAL, Tier.PEER)
    return (
        bool(ranks)
        and complete.world == world
        and all(complete.tiers[rank] in near for rank in ranks)
    )


def without(
    copies: Copies, lineage: Lineage, node_ranks: Collection[int], tier: Tier
) -> StepId | None:
    """The newest step that this tier and stronger ones would still hold, whole, without what these
    nodes told of."""
    for id in reversed(copies.steps):
        if lineage.restorable(id):
            left = copies.coverage(id, tier, without=node_ranks)
            if left is not None and left.whole:
                return id
    return None
