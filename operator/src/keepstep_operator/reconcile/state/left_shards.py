"""The agents of nodes on which places of a run left shards: whom they serve. Pure.

A place is named the agents of the nodes that it left, until the run holds a newer commit without
these shards. An agent that is not ready yet is waited for, but not on a node that is down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from keepstep.leader.orphaned_shards import OrphanedShard
from keepstep.steps import EpochId, StepId
from keepstep_operator.api.run import HolderStatus
from keepstep_operator.spans import numbers

if TYPE_CHECKING:
    from keepstep_operator.reconcile.state.run import Run


def reachable(run: Run) -> Iterator[OrphanedShard]:
    """The shards that lie on nodes that are up. If nodes are not watched, all are."""
    for left in run.ledger.orphans:
        node = run.nodes.get(left.node)
        if node.ready if node is not None else not run.nodes:
            yield left


def agents(run: Run, node_rank: int) -> dict[str, str]:
    """The agents that serve what this place left: node -> address."""
    found = [one.node for one in _served(run) if one.node_rank == node_rank]
    return {node: run.agents[node].address for node in found}


def awaits(run: Run, node_rank: int) -> str:
    """Why the vote of this place's pod must wait; '': it need not."""
    for left in _unserved(run):
        if left.node_rank == node_rank and left.node in run.agents:
            return (
                f"shards of node rank {node_rank} lie on node {left.node}, whose agent is not"
                " ready yet"
            )
    return ""


def restart_step(run: Run) -> StepId | None:
    """The newest step of which something was left, if agents serve all of that; else None."""
    newest = run.ledger.orphans.newest
    needed = {one for one in run.ledger.orphans if one.step == newest}
    return newest if needed <= {*_served(run)} else None


def served(run: Run) -> str:
    """A message: which shards are served from which node; '': none are."""
    return _said(_served(run), "served by the agent of node")


def unserved(run: Run) -> str:
    """The same of shards that no agent serves although their node is up."""
    return _said(_unserved(run), "not served, as no agent is ready, on node")


def _served(run: Run) -> list[OrphanedShard]:
    return [one for one in reachable(run) if (at := run.agents.get(one.node)) and at.address]


def _unserved(run: Run) -> list[OrphanedShard]:
    served = _served(run)
    return [one for one in reachable(run) if one not in served]


def _said(left: Iterable[OrphanedShard], how: str) -> str:
    ranks: dict[str, list[str]] = {}
    for one in left:
        ranks.setdefault(one.node, []).append(str(one.node_rank))
    return "; ".join(
        f"shards of node ranks {', '.join(of)} are {how} {node}" for node, of in ranks.items()
    )


def written(
    holders: Iterable[HolderStatus], *, commit: StepId | None, epoch: EpochId | None
) -> Iterator[OrphanedShard]:
    """The orphaned shards that an earlier reconciler wrote down.

    If no commit is known any more, the shards are needed for the newest step that lies there.
    """
    for holder in holders:
        step = commit
        if step is None and epoch is not None and holder.step is not None:
            with contextlib.suppress(ValueError):  # the status was edited
                step = StepId(epoch, holder.step)
        if step is not None:
            for node_rank in numbers(holder.node_ranks):
                yield OrphanedShard(node=holder.node, node_rank=node_rank, step=step)
