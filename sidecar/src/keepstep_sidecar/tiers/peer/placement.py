"""Which pod is whose buddy, and what buddies should hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable

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
