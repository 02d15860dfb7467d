"""Shards that a run's pods left on the drives of nodes when they went on elsewhere. Pure.

A drive outlives its pod, but no pod reports its shards any more, so the ledger does not know them.
This module remembers them: from the last report of the pod that left or, after a restart of the
leader, from `keepstep.wire.run_reports.LeaderRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from keepstep.leader.node_rank_states import NodeRankState
from keepstep.steps import StepId


@dataclass(frozen=True, kw_only=True)
class NodeOrphanedShards:
    """The shards that one place of the run left on one node. `step`: the newest step that was
    committed when the place was still there. A restart needs these shards for that step."""

    node: str
    node_rank: int
    step: StepId


class OrphanedShards:
    """All orphaned shards of one run."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], NodeOrphanedShards] = {}

    def __iter__(self) -> Iterator[NodeOrphanedShards]:
        return iter([self._held[key] for key in sorted(self._held)])

    @property
    def newest(self) -> StepId | None:
        """The newest step for which orphaned shards are needed."""
        return max((shard.step for shard in self._held.values()), default=None)

    def record_place_move(
        self,
        node_rank: int,
        place: NodeRankState,
        *,
        to: str,
        commit: StepId | None,
        newest: StepId | None,
    ) -> None:
        """The place is now on node `to`. Its shards on the former node are needed for the newest
        committed step that they can have: `commit`, or `newest`, their newest step, if that is
        older."""
        if commit is None or newest is None:
            return
        if place.stays and place.node and place.node != to:
            left = NodeOrphanedShards(
                node=place.node, node_rank=node_rank, step=min(commit, newest)
            )
            self._held[left.node, node_rank] = left

    def back(self, node_rank: int, node: str) -> None:
        """A pod of this place is on this node (again), and itself reports the shards that lie
        there."""
        self._held.pop((node, node_rank), None)

    def forget_older(self, by: StepId | None) -> None:
        """Forget the shards of steps older than `by`, which is available elsewhere."""
        if by is not None:
            self._held = {key: shard for key, shard in self._held.items() if shard.step >= by}

    def resume(self, left: Iterable[tuple[str, int, StepId]]) -> None:
        """Take over what an earlier leader knew, as node, node rank and step. Places that are still
        there take their shards back when they report."""
        for node, node_rank, step in left:
            shard = NodeOrphanedShards(node=node, node_rank=node_rank, step=step)
            self._held.setdefault((node, node_rank), shard)
