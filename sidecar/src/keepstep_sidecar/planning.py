"""What this sidecar would restore if nobody asked: a hint, to fetch and hash ahead of time."""

from __future__ import annotations

from keepstep.ledger import RestorePlan
from keepstep.steps import Tier
from keepstep_sidecar.catalog import Catalog


def plan(catalog: Catalog) -> RestorePlan | None:
    """What would be restored now, if that is known."""
    newest = catalog.look().watermark(Tier.MEMORY)
    beyond = _plan_beyond(catalog)
    if beyond is not None and (newest is None or newest < beyond.id):
        return beyond
    if newest is None:
        return None
    found = catalog.ledger.plan(range(catalog.reach.world_of(newest) or 0))
    return found if isinstance(found, RestorePlan) else None


def _plan_beyond(catalog: Catalog) -> RestorePlan | None:
    """Where other ranks are elsewhere: the operator's plan for those ranks here that hold it.

    Else the last commit, for those that have nothing newer in memory: with that, and without
    an operator, only the vote can tell what the others have, too.
    """
    nearest, told = catalog.reach.nearest, catalog.overview.plan
    if told is not None and catalog.ledger.lineage.restorable(told):
        tiers = {rank: tier for rank in catalog.ranks() if (tier := nearest(told, rank))}
        if tiers:
            return RestorePlan(told, tiers)
    if (id := catalog.last_commit()) is None:
        return None
    tiers = {
        rank: tier
        for rank in catalog.ranks()
        if (tier := nearest(id, rank)) and id >= catalog.newest_in_memory(rank, id)
    }
    return RestorePlan(id, tiers) if tiers else None
