"""A wish, never a must: that a pod comes to a node which holds shards of its run.

Only preferred affinity: a node that is full or gone must not keep a pod from being scheduled. Nodes
are named by `metadata.name`, since a node's hostname label may be another word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep_operator.bodies import Body

_KINDS = ("nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution")


@dataclass(frozen=True, order=True)
class Near:
    """A node that holds something for the pod. `weight` from 1 to 100, as the scheduler adds it."""

    node: str
    weight: int


def preferring(spec: Body, near: Iterable[Near]) -> Body | None:
    """The pod's `affinity` with these nodes beside what its owner prefers; None: leave it alone."""
    terms = [_term(one) for one in near]
    if not terms:
        return None
    affinity = dict(spec.get("affinity") or {})
    of_nodes = dict(affinity.get(_KINDS[0]) or {})
    of_nodes[_KINDS[1]] = [*(of_nodes.get(_KINDS[1]) or []), *terms]
    return {**affinity, _KINDS[0]: of_nodes}


def _term(near: Near) -> Body:
    field = {"key": "metadata.name", "operator": "In", "values": [near.node]}
    return {"weight": near.weight, "preference": {"matchFields": [field]}}
