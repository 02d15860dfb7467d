"""What the sidecar costs, and whose resources it takes.

Its memory is the slots plus the policy's overhead: pages of shared memory are charged to the
sidecar, which touches them first. Requests equal limits, since memory cannot be taken back. Slots
of huge pages are a resource of their own. The sidecar's memory limit stays the same then, because
small images, and images of an older library, use small pages all the same.

CPU has no limit if the pod has none. An idle sidecar takes next to no CPU, but it starts, makes
slots and flushes only as fast as its CPU allows: with a limit of a tenth of a core it delayed a
pod's start by 16 seconds. A Guaranteed pod stays Guaranteed.

`CarveOut` takes the same amounts from the training container, so quotas and queues see no change.
It takes all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from keepstep_operator.api.policy import EmptyDir, Policy
from keepstep_operator.api.quantities import (
    format_bytes,
    format_millicores,
    parse_bytes,
    parse_millicores,
)
from keepstep_operator.bodies import Body
from keepstep_operator.names import HUGE_PAGES

EPHEMERAL_STORAGE: Final = "ephemeral-storage"
_KINDS: Final = ("requests", "limits")
_ENOUGH_MILLICORES: Final = 500
_AMPLE_MILLICORES: Final = 2000
_LOGS_BYTES: Final = 256 << 20
"""Ephemeral storage for the sidecar's log, in addition to its volumes."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU in millicores, memory in bytes. `cpu_limit`: in millicores; None for no limit.
    `spare_bytes`: how much the memory limit exceeds the request. `huge_bytes`: huge pages."""

    millicores: int
    memory_bytes: int
    cpu_limit: int | None = None
    spare_bytes: int = 0
    huge_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """How to read and write one resource."""

    name: str
    cost: Callable[[Cost], int]
    parse: Callable[[str | int | float], int]
    format: Callable[[int], str]


_UNITS: Final = (
    _Unit(name="cpu", cost=lambda cost: cost.millicores, parse=parse_millicores,
          format=format_millicores),
    _Unit(name="memory", cost=lambda cost: cost.memory_bytes, parse=parse_bytes,
          format=format_bytes),
)  # fmt: skip


def cost_of(policy: Policy, containers: list[Body]) -> Cost:
    """The cost of the sidecar in a pod with these containers. If any has a CPU limit, the sidecar
    gets one, too: a quota may require it of all containers."""
    cpu, limit, guaranteed = policy.cpu_millicores, None, all(map(_is_guaranteed, containers))
    if guaranteed:
        cpu = limit = max(cpu, _ENOUGH_MILLICORES)
    elif any("cpu" in _amounts(one, "limits") for one in containers):
        limit = max(cpu, _AMPLE_MILLICORES)
    spare = policy.memory_limit_bytes if policy.huge_bytes and not guaranteed else 0
    return Cost(
        millicores=cpu,
        memory_bytes=policy.memory_limit_bytes + policy.overhead_bytes - spare,
        cpu_limit=limit,
        spare_bytes=spare,
        huge_bytes=policy.huge_bytes,
    )


def resources_of(cost: Cost) -> Body:
    """The container's `resources`: requests, and limits. These equal the requests, except for CPU
    and `spare_bytes`."""
    requests = {unit.name: unit.format(unit.cost(cost)) for unit in _UNITS}
    limits = {"memory": format_bytes(cost.memory_bytes + cost.spare_bytes)}
    if cost.huge_bytes:
        requests[HUGE_PAGES] = limits[HUGE_PAGES] = format_bytes(cost.huge_bytes)
    if cost.cpu_limit is not None:
        limits["cpu"] = format_millicores(cost.cpu_limit)
    return {"requests": requests, "limits": limits}


def _is_guaranteed(container: Body) -> bool:
    """Whether the container's requests equal its limits (requests default to limits)."""
    requests, limits = _amounts(container, "requests"), _amounts(container, "limits")
    return all(
        unit.name in limits
        and unit.parse(requests.get(unit.name) or limits[unit.name])
        == unit.parse(limits[unit.name])
        for unit in _UNITS
    )


def _amounts(container: Body, kind: str) -> Body:
    return (container.get("resources") or {}).get(kind) or {}


def carve(resources: Body, cost: Cost) -> tuple[Body, str]:
    """The training container's `resources` less the requests of `cost`; or unchanged, with the
    reason.

    Only the requested amounts are subtracted, from requests and from limits. `spare_bytes` are not,
    since they would go from the limits alone, and a pod whose request exceeds its limit is invalid.
    Every amount of CPU and memory that is named must leave something; memory must be named.
    """
    if not any("memory" in (resources.get(kind) or {}) for kind in _KINDS):
        return resources, "the training container asks for no memory"
    left = {kind: dict(resources[kind]) for kind in _KINDS if resources.get(kind)}
    for kind, unit in _named(left):
        rest = unit.parse(left[kind][unit.name]) - unit.cost(cost)
        if rest <= 0:
            needed = unit.format(unit.cost(cost))
            return resources, (
                f"the sidecar needs {needed} of {unit.name}, the training container's"
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
        EPHEMERAL_STORAGE in ((one.get("resources") or {}).get("limits") or {})
        for one in containers
    )
    directories = [one for one in policy.volumes if isinstance(one.source, EmptyDir)]
    if not limited or not directories:
        return None, ""
    sizes = [one.usable_bytes for one in directories]
    if None in sizes:
        return None, (
            "a container limits ephemeral-storage and the policy's emptyDir has no capacity: the"
            " kubelet may evict the pod; set capacity"
        )
    return format_bytes(sum(size for size in sizes if size) + _LOGS_BYTES), ""


def _named(amounts: dict[str, Body]) -> Iterator[tuple[str, _Unit]]:
    for kind, names in amounts.items():
        for unit in _UNITS:
            if unit.name in names:
                yield kind, unit
