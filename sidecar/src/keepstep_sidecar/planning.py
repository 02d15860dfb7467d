"""What this sidecar would restore if nobody asked: a hint, to fetch and hash ahead of time."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.ledger import RestorePlan
from keepstep.steps import StepId, Tier
from keepstep_sidecar.catalog import Catalog


def plan(catalog: Catalog) -> RestorePlan | None:
    """What would be restored now, if that is known."""
    complete = catalog.look().watermark(Tier.MEMORY)
    if (wanted := catalog.wanted()) is not None:
        return _plan_of(catalog, wanted)
    beyond = _plan_beyond(catalog)
    # what is whole by twins alone does not tell what ranks elsewhere could go on from
    if beyond is not None and (complete is None or complete < beyond.id):
        return beyond
    if not catalog.ledger.whole():
        return None
    # of a rank that has nothing here, nobody here can ever tell what it has
    found = catalog.ledger.plan(catalog.ranks())
    return found if isinstance(found, RestorePlan) else None


def _plan_beyond(catalog: Catalog) -> RestorePlan | None:
    """Where other ranks are elsewhere: the operator's plan for those ranks here that hold it.

    Else the last commit, for those that have nothing newer in memory: with that, and without
    an operator, only the vote can tell what the others have, too.
    """
    told = catalog.overview.plan
    restorable = told is not None and catalog.ledger.lineage.restorable(told)
    if told is not None and restorable and (found := _plan_of(catalog, told)) is not None:
        return found
    if (id := catalog.last_commit()) is None:
        return None
    ranks = [rank for rank in catalog.ranks() if id >= catalog.telling.newest_in_memory(rank, id)]
    return _plan_of(catalog, id, ranks)


def _plan_of(
    catalog: Catalog, id: StepId, ranks: Iterable[int] | None = None
) -> RestorePlan | None:
    """This step, for those of `ranks` (None: all here) that hold it."""
    asked = catalog.ranks() if ranks is None else ranks
    tiers = {rank: tier for rank in asked if (tier := catalog.reach.nearest(id, rank))}
    return RestorePlan(id, tiers) if tiers else None
