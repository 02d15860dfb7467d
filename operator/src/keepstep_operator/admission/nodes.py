"""Which nodes have huge pages, to decide a policy with `memory.hugePages: Auto`.

A pod that requests more huge pages than any node has stays Pending for ever. So it requests them
only if every node that it may run on has enough for as many such pods as its GPUs allow. Required
affinity is not evaluated, which only makes this stricter. Huge pages that other pods have taken are
left to the scheduler. And a pod requests them only if an fsGroup, which hugetlbfs needs, changes
nothing of the user's.
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
_HARMLESS: Final = {"emptyDir", "hostPath", "configMap", "downwardAPI", "projected", "secret"}
_GROUP_READS: Final = 0o040


@dataclass(frozen=True, kw_only=True)
class _Node:
    labels: Mapping[str, str]
    taints: tuple[Body, ...]
    allocatable: Mapping[str, str]

    def gives(self, amounts: Mapping[str, int], own_bytes: int) -> int:
        """The bytes of huge pages that are left for each pod, when as many pods as fit share this
        node. `amounts`: the extended resources of a pod. `own_bytes`: the huge pages that its
        containers request themselves."""
        has = {name: parse_bytes(self.allocatable.get(name) or 0) for name in amounts}
        pods = min((has[name] // amount for name, amount in amounts.items()), default=1)
        return parse_bytes(self.allocatable.get(HUGE_PAGES) or 0) // max(1, pods) - own_bytes


class NodeCache:
    """The cluster's nodes. Without `run`, or before all were seen, no policy gets huge pages from
    Auto."""

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
        """Watch the nodes for ever."""
        await follow(self._client, [self._feed])

    def seen(self, body: Body) -> None:
        """A Node exists or has changed."""
        self._nodes[str(_name(body))] = _Node(
            labels=body["metadata"].get("labels") or {},
            taints=tuple((body.get("spec") or {}).get("taints") or ()),
            allocatable=(body.get("status") or {}).get("allocatable") or {},
        )

    def gone(self, name: str) -> None:
        """A Node was deleted."""
        self._nodes.pop(name, None)

    def settled(self, policy: Policy, spec: Body) -> Policy:
        """The policy for a pod with this spec. `HugePages.AUTO` becomes `ALWAYS` or `NONE`."""
        if policy.huge_pages is not HugePages.AUTO:
            return policy
        asking = replace(policy, huge_pages=HugePages.ALWAYS)
        amounts, own_bytes = _extended(spec), _requested(spec).get(HUGE_PAGES, 0)
        nodes = [one for one in self._nodes.values() if _may_run(spec, one)]
        least = min((one.gives(amounts, own_bytes) for one in nodes), default=0)
        harmless = not any(map(_minds, spec.get("volumes") or ())) or _has_group(spec)
        enough = self.synced and harmless and least >= asking.huge_bytes
        return asking if enough else replace(policy, huge_pages=HugePages.NONE)


def _requested(spec: Body) -> dict[str, int]:
    """The requests of all containers together, by resource: extended resources as integers, and
    huge pages in bytes."""
    found: dict[str, int] = {}
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        resources = container.get("resources") or {}
        amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, amount in amounts.items():
            if "/" in name or name == HUGE_PAGES:
                found[name] = found.get(name, 0) + parse_bytes(amount)
    return found


def _extended(spec: Body) -> dict[str, int]:
    """The requested resources that device plugins hand out, like GPUs and network cards."""
    return {name: amount for name, amount in _requested(spec).items() if "/" in name and amount}


def _has_group(spec: Body) -> bool:
    return (spec.get("securityContext") or {}).get("fsGroup") is not None


def _minds(volume: Body) -> bool:
    """Whether an fsGroup could change what the user's containers find in this volume: files of a
    claim get another group, and a Secret's files of mode 0600 become 0640, which ssh refuses for a
    key."""
    kinds = set(volume) - {"name"}
    if not kinds <= _HARMLESS:
        return True
    if str((volume.get("emptyDir") or {}).get("medium")).startswith("HugePages"):
        return True  # the kubelet mounts huge pages of one size only
    secret = volume.get("secret") or {}
    modes = [secret.get("defaultMode"), *(one.get("mode") for one in secret.get("items") or ())]
    return any(mode is not None and not mode & _GROUP_READS for mode in modes)


def _may_run(spec: Body, node: _Node) -> bool:
    wanted = (spec.get("nodeSelector") or {}).items()
    return all(node.labels.get(key) == value for key, value in wanted) and all(
        any(_tolerates(one, taint) for one in spec.get("tolerations") or ())
        for taint in node.taints
        if taint.get("effect") in _REPELS
    )


def _tolerates(toleration: Body, taint: Body) -> bool:
    """As the scheduler decides it (k8s.io/api/core/v1, Toleration.ToleratesTaint)."""
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
