"""A preference, never a requirement: that a pod is scheduled to a node with shards of its run.

Only preferred affinity is used, because a full or lost node must not keep a pod from being
scheduled. Nodes are selected by `metadata.name`, since a node's hostname label may differ from its
name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep_operator.bodies import Body

_KINDS = ("nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution")


@dataclass(frozen=True, order=True)
class Near:
    """A node that holds shards for the pod. `weight`: from 1 to 100, as the scheduler adds it."""

    node: str
    weight: int


def preferring(spec: Body, near: Iterable[Near]) -> Body | None:
    """The pod's `affinity` plus a preference for these nodes; None: do not change it."""
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
