"""Which nodes give huge pages: what a policy with `memory.hugePages: Auto` is decided by.

A pod that asks for more of them than any node has stays Pending for ever. So it asks only where
every node that it may run on has enough; required affinity is not looked at, which only makes that
stricter. What other pods have taken of them is the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from keepstep_operator.api.policy import HugePages, Policy
from keepstep_operator.api.quantities import parse_bytes
from keepstep_operator.bodies import Body
from keepstep_operator.kube import NODES, Client, Feed, follow
from keepstep_operator.names import HUGE_PAGES

_REPELS: Final = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class _Node:
    labels: Mapping[str, str]
    taints: tuple[Body, ...]
    huge_bytes: int


class NodeCache:
    """The cluster's nodes. Without `run`, or before all were seen, none gives any."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._nodes: dict[str, _Node] = {}
        self._feed = Feed[str](
            name="nodes", resource=NODES, key_of=_name, seen=self.seen, gone=self.gone
        )

    @property
    def synced(self) -> bool:
        """Whether all nodes were seen once."""
        return self._feed.loaded.is_set()

    async def run(self) -> None:
        """Follow them for ever."""
        await follow(self._client, [self._feed])

    def seen(self, body: Body) -> None:
        """A Node is there, or has changed."""
        allocatable = (body.get("status") or {}).get("allocatable") or {}
        self._nodes[str(_name(body))] = _Node(
            labels=body["metadata"].get("labels") or {},
            taints=tuple((body.get("spec") or {}).get("taints") or ()),
            huge_bytes=parse_bytes(allocatable.get(HUGE_PAGES) or 0),
        )

    def gone(self, name: str) -> None:
        """It is not any more."""
        self._nodes.pop(name, None)

    def settled(self, policy: Policy, spec: Body) -> Policy:
        """The policy for a pod with this spec: Auto becomes one of the others."""
        if policy.huge_pages is not HugePages.AUTO:
            return policy
        asking = replace(policy, huge_pages=HugePages.ALWAYS)
        nodes = [one for one in self._nodes.values() if _may_run(spec, one)]
        least = min((one.huge_bytes for one in nodes), default=0)
        enough = self.synced and least >= asking.huge_bytes
        return asking if enough else replace(policy, huge_pages=HugePages.NONE)


def _may_run(spec: Body, node: _Node) -> bool:
    wanted = (spec.get("nodeSelector") or {}).items()
    return all(node.labels.get(key) == value for key, value in wanted) and all(
        any(_tolerates(one, taint) for one in spec.get("tolerations") or ())
        for taint in node.taints
        if taint.get("effect") in _REPELS
    )


def _tolerates(toleration: Body, taint: Body) -> bool:
    """As the scheduler has it (k8s.io/api/core/v1, Toleration.ToleratesTaint)."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    exists = toleration.get("operator") == "Exists"
    return exists or (
        bool(toleration.get("key"))
        and (toleration.get("value") or "") == (taint.get("value") or "")
    )


def _name(body: Body) -> str | None:
    return str((body.get("metadata") or {}).get("name") or "") or None
