"""Shards that a run's pods left behind on drives of nodes, when they went on elsewhere. Pure.

A drive outlives its pod, but nobody on that node speaks for it any more, so the ledger knows
nothing of it. Here is remembered where what lies: from the last report of the pod that left, or,
after the reconciler itself was restarted, from CheckpointRun.status.holders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from keepstep.steps import EpochId, StepId
from keepstep_operator.api.run import HolderStatus
from keepstep_operator.reconcile.state.node_rank import Place
from keepstep_operator.spans import numbers


@dataclass(frozen=True, kw_only=True)
class OrphanedShard:
    """What one place of the run left on one node. `step`: the newest that was committed when it
    was still there, and so what a restart needs these shards for."""

    node: str
    node_rank: int
    step: StepId


class OrphanedShards:
    """Of one run."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], OrphanedShard] = {}

    def __iter__(self) -> Iterator[OrphanedShard]:
        return iter([self._held[key] for key in sorted(self._held)])

    @property
    def newest(self) -> StepId | None:
        """The newest step that anything left behind is needed for."""
        return max((one.step for one in self._held.values()), default=None)

    def moved(
        self,
        node_rank: int,
        place: Place,
        *,
        to: str,
        commit: StepId | None,
        newest: StepId | None,
    ) -> None:
        """The place is now on node `to`. What stays behind, of which `newest` is the last step, is
        needed as far as it is committed."""
        if commit is None or newest is None:
            return
        if place.stays and place.node and place.node != to:
            left = OrphanedShard(node=place.node, node_rank=node_rank, step=min(commit, newest))
            self._held[left.node, node_rank] = left

    def back(self, node_rank: int, node: str) -> None:
        """A pod of this place is on this node (again), and speaks for what lies there itself."""
        self._held.pop((node, node_rank), None)

    def superseded(self, by: StepId | None) -> bool:
        """Forget what a newer step makes needless, which lies elsewhere. Whether anything was."""
        done = [key for key, one in self._held.items() if by is not None and one.step < by]
        for key in done:
            del self._held[key]
        return bool(done)

    def resume(
        self, holders: Iterable[HolderStatus], *, commit: StepId | None, epoch: EpochId | None
    ) -> None:
        """What an earlier reconciler wrote down; pods that are still there take it back.

        With no commit known any more it is about the newest step that lies there.
        """
        for holder in holders:
            step = commit
            if step is None and epoch is not None and holder.step is not None:
                with contextlib.suppress(ValueError):  # a status that somebody edited
                    step = StepId(epoch, holder.step)
            if step is None:
                continue
            for node_rank in numbers(holder.node_ranks):
                left = OrphanedShard(node=holder.node, node_rank=node_rank, step=step)
                self._held.setdefault((holder.node, node_rank), left)
