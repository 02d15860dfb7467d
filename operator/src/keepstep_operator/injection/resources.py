"""What the sidecar costs, and who pays.

Its memory is the slots (pages of the shared memory are charged to the sidecar, which touches them
first) plus the policy's overhead; requests equal limits, so that a Guaranteed pod stays one.
`CarveOut` takes the same amounts from the training container, for which quotas and queues then see
no change; it is all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from keepstep_operator.bodies import Body
from keepstep_operator.policy import EmptyDir, Policy
from keepstep_operator.quantities import (
    format_bytes,
    format_millicores,
    parse_bytes,
    parse_millicores,
)

EPHEMERAL_STORAGE: Final = "ephemeral-storage"
_KINDS: Final = ("requests", "limits")
_LOGS_BYTES: Final = 256 << 20
"""Of ephemeral storage, for the sidecar's log beside its volumes."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU in millicores, memory in bytes."""

    millicores: int
    memory_bytes: int


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


def cost_of(policy: Policy) -> Cost:
    """Of the sidecar of one pod."""
    return Cost(
        millicores=policy.cpu_millicores,
        memory_bytes=policy.memory_limit_bytes + policy.overhead_bytes,
    )


def resources_of(cost: Cost) -> Body:
    """Requests equal to limits."""
    amounts = {unit.name: unit.format(unit.cost(cost)) for unit in _UNITS}
    return {"requests": dict(amounts), "limits": dict(amounts)}


def carve(resources: Body, cost: Cost) -> tuple[Body, str]:
    """The training container's `resources` less `cost`; or unchanged, and why not.

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
    """The ephemeral storage that the sidecar must ask for, and a warning when that is unknown.

    Once any container has a limit, the kubelet evicts the pod when all its emptyDirs together use
    more than the sum of the limits: then ours has to be in it. None: no limit is needed.
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
