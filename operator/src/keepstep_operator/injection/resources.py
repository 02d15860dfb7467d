"""What the sidecar costs, and whose resources it takes.

Its memory is the slots plus the policy's overhead: pages of shared memory are charged to the
sidecar, which touches them first. Requests equal limits, since memory cannot be taken back. Slots
of huge pages are a resource of their own. The sidecar's memory limit stays the same then, because
small images use small pages all the same.

CPU has no limit unless something asks for one: the policy (`cpuLimit`), a Guaranteed pod, which
stays Guaranteed, or a LimitRange of the namespace. An idle sidecar takes next to no CPU,
but it starts, makes slots and flushes only as fast as its CPU allows: with a limit of a tenth of a
core it delayed a pod's start by 16 seconds.

Where the namespace has LimitRanges, CPU is cut to what these leave (`namespace_limits`).

`CarveOut` takes the same amounts from the training container, requests and limits, so quotas and
queues see no change. It takes all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from keepstep_operator.api.policy import Accounting, EmptyDir, Policy
from keepstep_operator.api.quantities import (
    format_bytes,
    format_millicores,
    parse_bytes,
    parse_millicores,
)
from keepstep_operator.injection.namespace_limits import (
    LIMITS,
    REQUESTS,
    NamespaceLimits,
    container_amounts,
    smallest,
)
from keepstep_operator.names import HUGE_PAGES
from keepstep_operator.object_body import Body

EPHEMERAL_STORAGE: Final = "ephemeral-storage"
_KINDS: Final = (REQUESTS, LIMITS)
_ENOUGH_MILLICORES: Final = 500
"""The CPU limit where it counts as a request, too: in a Guaranteed pod."""
_AMPLE_MILLICORES: Final = 2000
"""The CPU limit where a LimitRange asks for one."""
_LOGS_BYTES: Final = 256 << 20
"""Ephemeral storage for the sidecar's log, in addition to its volumes."""


@dataclass(frozen=True, kw_only=True)
class SidecarCost:
    """CPU in millicores, memory in bytes. `cpu_limit`: in millicores; None for no limit.
    `spare_bytes`: how much the memory limit exceeds the request. `huge_bytes`: huge pages."""

    millicores: int
    memory_bytes: int
    cpu_limit: int | None = None
    spare_bytes: int = 0
    huge_bytes: int = 0

    def clamp_to_limits(self, room: NamespaceLimits) -> SidecarCost:
        """The cost as the namespace's LimitRanges let a container have it, as far as it can be
        changed: more of a request that is too small, less of a limit that is too large."""
        cpu = _between(
            self.millicores, room.container_minimum("cpu"), room.container_maximum("cpu")
        )
        limit = self.cpu_limit
        if limit is not None and limit != self.millicores:
            ratio = room.ratio("cpu")
            most = room.container_maximum("cpu"), None if ratio is None else cpu * ratio // 1000
            limit = _between(limit, cpu, smallest(most))
        elif limit is not None:
            limit = cpu
        memory = max(self.memory_bytes, room.container_minimum("memory"))
        return replace(self, millicores=cpu, cpu_limit=limit, memory_bytes=memory)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """How to read and write one resource. `limit`: the part of the sidecar's limit that is carved
    out."""

    name: str
    cost: Callable[[SidecarCost], int]
    limit: Callable[[SidecarCost], int]
    parse: Callable[[str | int | float], int]
    format: Callable[[int], str]


_UNITS: Final = (
    _Unit(name="cpu", cost=lambda cost: cost.millicores,
          limit=lambda cost: cost.millicores if cost.cpu_limit is None else cost.cpu_limit,
          parse=parse_millicores, format=format_millicores),
    _Unit(name="memory", cost=lambda cost: cost.memory_bytes, limit=lambda cost: cost.memory_bytes,
          parse=parse_bytes, format=format_bytes)
)  # fmt: skip


def cost_of(policy: Policy, spec: Body, training: Body, room: NamespaceLimits) -> SidecarCost:
    """The cost of the sidecar in this pod. `training`: the container that CarveOut takes from."""
    guaranteed = is_guaranteed(spec)
    carved = policy.accounting is Accounting.CARVE_OUT
    spare = policy.memory_limit_bytes if policy.huge_bytes and not guaranteed else 0
    cost = SidecarCost(
        millicores=policy.cpu_millicores,
        memory_bytes=policy.memory_limit_bytes + policy.overhead_bytes - spare,
        cpu_limit=_cpu_limit(policy, room),
        spare_bytes=spare,
        huge_bytes=policy.huge_bytes,
    )
    cost = (_guaranteed(cost, training, carved) if guaranteed else cost).clamp_to_limits(room)
    return _carvable(cost, training) if carved and not guaranteed else cost


def _cpu_limit(policy: Policy, room: NamespaceLimits) -> int | None:
    """The CPU limit to begin with; None: the sidecar needs none."""
    if policy.cpu_limit_millicores is not None:
        return policy.cpu_limit_millicores
    if room.is_limited("cpu"):
        return max(policy.cpu_millicores, _AMPLE_MILLICORES)
    return None


def _guaranteed(cost: SidecarCost, training: Body, carved: bool) -> SidecarCost:
    """Request and limit are equal. More than the policy's request is taken, since it is the limit,
    too; but no more than a quarter of a container that it is carved out of."""
    enough = cost.cpu_limit or _ENOUGH_MILLICORES
    if carved:
        enough = min(enough, container_amounts(training, LIMITS).get("cpu", 0) // 4)
    cpu = max(cost.millicores, enough)
    return replace(cost, millicores=cpu, cpu_limit=cpu)


def _carvable(cost: SidecarCost, training: Body) -> SidecarCost:
    """The same part of the training container's limit as of its request, so that the ratio between
    the two stays as it was."""
    requests, limits = (container_amounts(training, kind) for kind in _KINDS)
    if "cpu" not in limits or not requests.get("cpu"):
        return cost
    limit = max(cost.millicores, cost.millicores * limits["cpu"] // requests["cpu"])
    return replace(cost, cpu_limit=limit)


def resources_of(cost: SidecarCost) -> Body:
    """The container's `resources`: requests, and limits. These equal the requests, except for CPU
    and `spare_bytes`."""
    requests = {unit.name: unit.format(unit.cost(cost)) for unit in _UNITS}
    limits = {"memory": format_bytes(cost.memory_bytes + cost.spare_bytes)}
    if cost.huge_bytes:
        requests[HUGE_PAGES] = limits[HUGE_PAGES] = format_bytes(cost.huge_bytes)
    if cost.cpu_limit is not None:
        limits["cpu"] = format_millicores(cost.cpu_limit)
    return {"requests": requests, "limits": limits}


def is_guaranteed(spec: Body) -> bool:
    """Whether the pod is of quality of service Guaranteed: the requests of each container equal its
    limits (requests default to limits)."""
    return all(
        unit.name in limits and requests[unit.name] == limits[unit.name]
        for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
        for requests, limits in [[container_amounts(container, kind) for kind in _KINDS]]
        for unit in _UNITS
    )


def carve_resources(resources: Body, cost: SidecarCost) -> tuple[Body, str]:
    """The training container's `resources` less what `cost` takes of requests and of limits; or
    unchanged, with the reason.

    `spare_bytes` are not subtracted, since they would go from the limits alone, and a pod whose
    request exceeds its limit is invalid. Every amount of CPU and memory that is named must leave
    something; memory must be named.
    """
    if not any("memory" in (resources.get(kind) or {}) for kind in _KINDS):
        return resources, "the training container asks for no memory"
    left = {kind: dict(resources[kind]) for kind in _KINDS if resources.get(kind)}
    for kind, unit in _named(left):
        needs = unit.limit(cost) if kind == LIMITS else unit.cost(cost)
        rest = unit.parse(left[kind][unit.name]) - needs
        if rest <= 0:
            return resources, (
                f"the sidecar needs {unit.format(needs)} of {unit.name}, the training container's"
                f" {kind} are {left[kind][unit.name]}"
            )
        left[kind][unit.name] = unit.format(rest)
    return {**resources, **left}, ""


def storage_limit(policy: Policy, containers: list[Body]) -> tuple[str | None, str]:
    """The ephemeral storage that the sidecar must request, and a warning if that is unknown.

    Once any container has a limit, the kubelet evicts the pod when all its emptyDirs together use
    more than the sum of the limits. So our volumes must be included in it. None: no limit is
    needed.
    """
    limited = any(
        EPHEMERAL_STORAGE in ((container.get("resources") or {}).get("limits") or {})
        for container in containers
    )
    directories = [volume for volume in policy.volumes if isinstance(volume.source, EmptyDir)]
    if not limited or not directories:
        return None, ""
    sizes = [directory.usable_bytes for directory in directories]
    if None in sizes:
        return None, (
            "a container limits ephemeral-storage and the policy's emptyDir has no capacity: the"
            " kubelet may evict the pod; set capacity"
        )
    return format_bytes(sum(size for size in sizes if size) + _LOGS_BYTES), ""


def _between(amount: int, least: int, most: int | None) -> int:
    return max(least, amount if most is None else min(amount, most))


def _named(amounts: dict[str, Body]) -> Iterator[tuple[str, _Unit]]:
    for kind, names in amounts.items():
        for unit in _UNITS:
            if unit.name in names:
                yield kind, unit
