"""Which pod is whose buddy, what buddies should hold, and which copies may be deleted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from keepstep.steps import StepId
from keepstep_sidecar.tiers.peer.protocol import Wanted
from keepstep_sidecar.tiers.replicator import Due
from keepstep_sidecar.tiers.tier import LocalInventory


def buddies(own: int, others: Iterable[int], replicas: int) -> list[int]:
    """The next `replicas` node ranks after `own`, in a ring. So every pod keeps as many copies as
    it sends, and the loss of two neighbours costs the copies of one pod, not of several."""
    known = sorted(set(others) - {own})
    after = [rank for rank in known if rank > own] + [rank for rank in known if rank < own]
    return after[:replicas]


def due(local: LocalInventory) -> Due:
    """What buddies should hold: the newest commit and all later steps. Before these, of the commits
    that are still here, those that other pods send as well (`replicator.chosen`)."""
    commit = max(local.commits, default=None)
    return Due(
        shards=local.shards,
        owed=frozenset(id for id in local.shards if commit is None or id >= commit),
        settled=frozenset(id for id in local.shards if commit is None or id <= commit),
    )


def wanted(local: LocalInventory) -> Wanted:
    """What buddies should keep: what they should hold."""
    ranks: dict[int, tuple[StepId, ...]] = {}
    for id in sorted(due(local).owed):
        for rank in local.shards[id]:
            ranks[rank] = (*ranks.get(rank, ()), id)
    return Wanted(committed=max(local.commits, default=None), ranks=ranks)


def superseded(held: Mapping[int, Collection[StepId]], wanted: Wanted) -> list[tuple[StepId, int]]:
    """Copies (step, rank) that are no longer needed: they are no longer wanted, and are older than
    a copy of the same rank that is wanted, committed and whole here.

    None if the sender knows of no commit. It may have just come to a new node, and the copies that
    it does not know of may be all that the run has.
    """
    if wanted.committed is None:
        return []
    doomed = []
    for rank, wishes in wanted.ranks.items():
        here = set(held.get(rank, ()))
        anchor = _anchor(here & set(wishes), wanted.committed)
        doomed += [(id, rank) for id in here - set(wishes) if anchor is not None and id < anchor]
    return sorted(doomed)


def first_to_go(
    held: Mapping[int, Collection[StepId]], committed: Mapping[int, StepId]
) -> list[tuple[StepId, int]]:
    """Copies to delete when the volume is full, oldest first: all but the newest committed copy of
    each rank. `committed`: for each rank the newest commit that its sender knows. Of a rank without
    one, nothing is deleted."""
    doomed = []
    for rank, ids in held.items():
        kept = _anchor(ids, committed[rank]) if rank in committed else None
        if kept is not None:
            doomed += [(id, rank) for id in ids if id != kept]
    return sorted(doomed)


def _anchor(ids: Collection[StepId], committed: StepId) -> StepId | None:
    return max((id for id in ids if id <= committed), default=None)
