"""Which step the loss of one node would leave. Pure.

A rank whose image has twins (images of other ranks with the very same boxes) can be restored as
long as one of the twins exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from keepstep.core.commit_rule import is_full
from keepstep.steps import StepId

Sole: TypeAlias = "frozenset[str] | None"


def sole_nodes(by_node: Mapping[str, int], *, world: int) -> Sole:
    """The nodes that each hold the only copy of some part of a step; None: the step is incomplete.

    `by_node`: for each node, the ranks, as bits, of which its drives hold an image of this step, or
    a twin's image.
    """
    once = twice = 0
    for ranks in by_node.values():
        twice |= once & ranks
        once |= ranks
    if not is_full(once, world):
        return None
    sole = once & ~twice & ((1 << world) - 1)
    return frozenset(node for node, ranks in by_node.items() if ranks & sole)


def least_restart_step(newest_first: Iterable[tuple[StepId, Sole, Sole]]) -> StepId | None:
    """The step that a restart goes on from at the least, whichever single node is lost.

    By step: `sole_nodes` where twins count, and where they do not. A restart leaves out a step in
    which twins stand in for ranks that have their own images of an older complete step
    (`keepstep.core.ledger.Ledger.whole`).
    """
    with_twins: dict[StepId, Sole] = {}
    alone: dict[StepId, Sole] = {}
    for step_id, with_twins[step_id], own in newest_first:
        alone[step_id] = own
        if own == frozenset():
            break  # no older step decides
    nodes = _named(with_twins) | _named(alone) | {""}  # "": any node that no step needs
    left = _left(with_twins, nodes) | _left(alone, nodes)
    return min(left.values()) if left.keys() == nodes else None


def find_steps_surviving_loss(sole: Mapping[StepId, Sole]) -> frozenset[StepId]:
    """For each node, the newest step that survives its loss. `sole`: `sole_nodes` of each step."""
    return frozenset(_left(sole, _named(sole)).values())


def _named(sole: Mapping[StepId, Sole]) -> frozenset[str]:
    return frozenset().union(*(nodes for nodes in sole.values() if nodes))


def _left(sole: Mapping[StepId, Sole], unspared: frozenset[str]) -> dict[str, StepId]:
    """By node, the newest step that survives its loss, of those that have one."""
    found: dict[str, StepId] = {}
    for step_id in sorted(sole, reverse=True):
        if (nodes := sole[step_id]) is not None:
            found |= dict.fromkeys(unspared - nodes, step_id)
            unspared &= nodes
    return found
