"""Shards that the run left on nodes where it no longer is, and the agents that serve them. Pure.

A place is named the agents of the nodes that it left, until the run holds a newer commit without
these shards. An agent that is not ready yet is waited for, but not on a node that is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from keepstep.leader.orphaned_shards import NodeOrphanedShards
from keepstep.steps import StepId

SERVED: Final = "served by the agent of node"
"""How `describe_left_shards` goes on where an agent serves shards."""


@dataclass(frozen=True, kw_only=True)
class LeftShards:
    """`left`: all that is needed. `agents`: addresses by node, '' while one is not ready. `lost`:
    nodes that exist no more. `asked`: those of `left` whose agents the operator was asked for."""

    left: tuple[NodeOrphanedShards, ...]
    agents: Mapping[str, str]
    lost: Collection[str]
    asked: Collection[NodeOrphanedShards]

    @property
    def reachable_shards(self) -> list[NodeOrphanedShards]:
        """Those on nodes that may still be there."""
        return [shard for shard in self.left if shard.node not in self.lost]

    @property
    def served_shards(self) -> list[NodeOrphanedShards]:
        return [shard for shard in self.reachable_shards if self.agents.get(shard.node)]

    @property
    def unserved_shards(self) -> list[NodeOrphanedShards]:
        """Those of which no agent is ready although their node is there."""
        return [shard for shard in self.reachable_shards if not self.agents.get(shard.node)]

    def agents_of(self, node_rank: int) -> dict[str, str]:
        """The agents that serve what this place left: node -> address."""
        return {
            shard.node: self.agents[shard.node]
            for shard in self.served_shards
            if shard.node_rank == node_rank
        }

    def wait_reason(self, node_rank: int) -> str:
        """Why the vote of this place must wait; '': it need not."""
        for shard in self.unserved_shards:
            known = shard.node not in self.agents and shard in self.asked
            if shard.node_rank == node_rank and not known:
                return (
                    f"shards of node rank {node_rank} lie on node {shard.node}, whose agent is not"
                    " ready yet"
                )
        return ""

    @property
    def newest_fully_served_step(self) -> StepId | None:
        """The newest step of which something was left, if agents serve all of that; else None."""
        newest = max((shard.step for shard in self.left), default=None)
        needed = {shard for shard in self.left if shard.step == newest}
        return newest if needed <= {*self.served_shards} else None


def describe_left_shards(left: Iterable[NodeOrphanedShards], how: str) -> str:
    """A sentence on these shards, by node; '': there are none."""
    ranks: dict[str, list[str]] = {}
    for shard in left:
        ranks.setdefault(shard.node, []).append(str(shard.node_rank))
    return "; ".join(
        f"shards of node ranks {', '.join(of)} are {how} {node}" for node, of in ranks.items()
    )
