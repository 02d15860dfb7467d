"""What a report says of ranks that are on other pods: copies kept for them, and the archive's.

The archive belongs to the run, and each pod tells of its own ranks. So that a pod that is lost does
not take with it what is known of its archived shards, the pods of the first and of the last rank
tell of all others, too.
"""

from __future__ import annotations

from keepstep.ledger import Held
from keepstep.reports import ReportedRank
from keepstep.steps import Answer, StepId, Tier
from keepstep_sidecar.remotes import held
from keepstep_sidecar.service import Service

_MOST_STEPS = 100
_MOST_COPIES = 8192
"""Told of the archive, newest steps first, so that a report stays well below the 4 MiB that the
operator takes (a copy is some 230 bytes). In a run of more ranks each pod tells of its own only."""


def others(service: Service) -> tuple[ReportedRank, ...]:
    """Ranks of which this pod has no image of its own."""
    here = set(service.catalog.ranks())
    kept: dict[int, list[Held]] = {}
    for one in service.beyond.kept():
        if one.rank not in here:
            kept.setdefault(one.rank, []).append(held(one))
    archived = {rank: found for rank, found in _archived(service).items() if rank not in here}
    ranks = sorted({*kept, *archived})
    return tuple(_rank(rank, kept.get(rank, []), archived.get(rank)) for rank in ranks)


def _rank(rank: int, kept: list[Held], archived: list[Held] | None) -> ReportedRank:
    copies = sorted(kept, key=lambda one: one.id)
    newest = max([*copies, *(archived or ())], key=lambda one: one.id)
    return ReportedRank(
        rank=rank,
        world=newest.world,
        alive=False,
        memory_answer=Answer.NONE,
        local_answer=Answer.NONE,
        peer=tuple(copies),
        peer_answer=Answer.STEPS if copies else None,
        archive=tuple(archived or ()),
        archive_answer=Answer.STEPS if archived else None,
    )


def _archived(service: Service) -> dict[int, list[Held]]:
    catalog = service.catalog
    told: dict[int, list[Held]] = {}
    if Tier.ARCHIVE not in catalog.remotes.tiers:
        return told
    left = _MOST_COPIES
    for id in sorted(catalog.remotes.complete, reverse=True)[:_MOST_STEPS]:
        if _speaks_for_all(service, id):
            if (left := left - len(catalog.remotes.of(id))) < 0:
                break
            for rank, places in catalog.remotes.of(id).items():
                found = [held(one.remote) for one in places if one.tier is Tier.ARCHIVE]
                told.setdefault(rank, []).extend(catalog.ancestry.own(found[:1]))
    return {rank: found for rank, found in told.items() if found}


def _speaks_for_all(service: Service, id: StepId) -> bool:
    world = service.catalog.reach.world_of(id)
    return world is not None and not {0, world - 1}.isdisjoint(service.catalog.ranks())
