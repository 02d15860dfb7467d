"""On which nodes the shards of a step lie: what the loss of one node would leave. Pure.

A rank whose image has twins (ranks that hold the very same boxes) is there as long as one of them
is. What is in the archive is on no node and outlives all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepstep.core.ledger import Held
from keepstep.steps import StepId


@dataclass(frozen=True, slots=True)
class Lying:
    """One durable image of a rank, on a node's drive."""

    node: str
    rank: int
    held: Held


def sole_nodes(copies: Iterable[Lying], *, world: int) -> frozenset[str] | None:
    """Nodes that each hold the only copy of something of a step; None: it is not complete at all.

    `copies`: of this one step.
    """
    nodes, twins = _by_rank(copies)
    found: set[str] = set()
    for rank in range(world):
        there = set().union(*(nodes.get(one, ()) for one in (rank, *twins.get(rank, ()))))
        if not there:
            return None
        if len(there) == 1:
            found |= there
    return frozenset(found)


def refuges(sole: Mapping[StepId, frozenset[str] | None]) -> frozenset[StepId]:
    """For each node the newest step that its loss would leave. `sole`: `sole_nodes` of each."""
    unspared = frozenset().union(*(nodes for nodes in sole.values() if nodes))
    found = set()
    for id in sorted(sole, reverse=True):
        nodes = sole[id]
        if nodes is not None and unspared - nodes:
            found.add(id)
            unspared &= nodes
    return frozenset(found)


def _by_rank(
    copies: Iterable[Lying],
) -> tuple[Mapping[int, set[str]], Mapping[int, tuple[int, ...]]]:
    """Nodes, and twins, of each rank; a rank of which no image is left has those of its twins."""
    nodes: dict[int, set[str]] = {}
    twins: dict[int, tuple[int, ...]] = {}
    for one in copies:
        nodes.setdefault(one.rank, set()).add(one.node)
        for rank in (one.rank, *one.held.twins) if one.held.twins else ():
            twins.setdefault(rank, (one.rank, *one.held.twins))
    return nodes, twins


def by_step(copies: Iterable[Lying]) -> dict[StepId, list[Lying]]:
    """The same, by step."""
    found: dict[StepId, list[Lying]] = {}
    for one in copies:
        found.setdefault(one.held.id, []).append(one)
    return found
