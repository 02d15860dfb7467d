"""Preferences, never requirements: that a pod is scheduled to a node with shards of its run, and
that pods which keep copies for each other are on different nodes.

Only preferred affinity is used, because a full or lost node must not keep a pod from being
scheduled. Nodes are selected by `metadata.name`, since a node's hostname label may differ from its
name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from keepstep_operator.api.tiers import HOSTNAME
from keepstep_operator.names import RUN_KEY_LABEL
from keepstep_operator.object_body import Body

_NODES: Final = "nodeAffinity"
_PODS: Final = "podAntiAffinity"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
_APART: Final = 100


@dataclass(frozen=True, order=True)
class NearNode:
    """A node that holds shards for the pod. `weight`: from 1 to 100, as the scheduler adds it."""

    node: str
    weight: int


def affinity_preferring(spec: Body, near: Iterable[NearNode], *, apart: str = "") -> Body | None:
    """The pod's `affinity` plus a preference for these nodes, and for a node without another pod of
    the run `apart`, '' for none. None: do not change it."""
    added = {_NODES: [_term(node) for node in near], _PODS: [_other_node(apart)] if apart else []}
    if not any(added.values()):
        return None
    affinity = dict(spec.get("affinity") or {})
    for kind, terms in added.items():
        if terms:
            own = affinity.get(kind) or {}
            affinity[kind] = {**own, _PREFERRED: [*(own.get(_PREFERRED) or []), *terms]}
    return affinity


def _term(near: NearNode) -> Body:
    field = {"key": "metadata.name", "operator": "In", "values": [near.node]}
    return {"weight": near.weight, "preference": {"matchFields": [field]}}


def _other_node(run_key: str) -> Body:
    """The term for a node without a pod of this run. Labels select in the pod's own namespace."""
    selector = {"matchLabels": {RUN_KEY_LABEL: run_key}}
    term = {"labelSelector": selector, "topologyKey": HOSTNAME}
    return {"weight": _APART, "podAffinityTerm": term}
