"""Who is whose buddy, what is sent next, and which copies may go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from keepstep.steps import StepId
from keepstep_sidecar.tiers.peer.protocol import Wanted


def buddies(own: int, others: Iterable[int], replicas: int) -> list[int]:
    """The next `replicas` node ranks after `own`, going round: everybody keeps as many copies as
    it has sent, and the loss of two neighbours costs one pod's copies, not several."""
    known = sorted(set(others) - {own})
    after = [rank for rank in known if rank > own] + [rank for rank in known if rank < own]
    return after[:replicas]


def better(one: StepId, other: StepId | None) -> StepId:
    """Which of two steps to send when the link cannot keep up: the one on the coarser grid.

    Every pod chooses for itself, and a step survives a node only when all its shards were sent. So
    pods that skip must skip the same steps: with the most trailing zeros in binary, then the newer.
    """
    return one if other is None or _merit(one) > _merit(other) else other


def _merit(id: StepId) -> tuple[int, int, StepId]:
    zeros = (id.step & -id.step).bit_length() if id.step else 64
    return id.epoch.number, zeros, id


def superseded(held: Mapping[int, Collection[StepId]], wanted: Wanted) -> list[tuple[StepId, int]]:
    """Copies (step, rank) that nobody needs: not wanted any more, and older than a copy of the same
    rank that is wanted, committed, and whole here.

    None at all from a sender that knows of no commit: it may have just come to a new node, and what
    it does not know may be all that the run has.
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
    """Copies that go when the volume is full, oldest first: all but the newest committed one of
    each rank. `committed`: by rank what its sender knows; of a rank without, nothing goes."""
    doomed = []
    for rank, ids in held.items():
        kept = _anchor(ids, committed[rank]) if rank in committed else None
        if kept is not None:
            doomed += [(id, rank) for id in ids if id != kept]
    return sorted(doomed)


def _anchor(ids: Collection[StepId], committed: StepId) -> StepId | None:
    return max((id for id in ids if id <= committed), default=None)
