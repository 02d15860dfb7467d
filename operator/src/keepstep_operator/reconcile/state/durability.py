"""What a run would outlive now, from what it holds and where. Pure.

emptyDir and ephemeral volumes go with their pod, so they outlive containers only. A hostPath stays
on its node: a pod that comes back to that node finds it. Copies with peers lie on another node, the
archive on none. Another job finds any of it only under the same run key, which needs the user's
label (see docs/support-matrix.md, "What a run survives"). A rank whose image has twins (ranks that
hold the very same boxes) is there as long as one of them is.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from keepstep.steps import StepId
from keepstep.wire.reports import ReportedShard
from keepstep_operator.api.model import VolumeKind


class Survives(str, enum.Enum):
    """What may happen to a run; values as users see them."""

    CONTAINER_RESTART = "ContainerRestart"
    POD_RESTART = "PodRestart"
    NODE_LOSS = "NodeLoss"
    JOB_RECREATE = "JobRecreate"

    def __str__(self) -> str:
        return self.value


def volumes_outlive_pod(kinds: Collection[VolumeKind]) -> bool:
    """Every one of them must: ranks are spread over the volumes of a pod."""
    return bool(kinds) and all(kind is VolumeKind.HOST_PATH for kind in kinds)


def survives(
    *,
    common: bool,
    committed: bool,
    spread: bool,
    archived: bool,
    kinds: Collection[VolumeKind],
    labelled: bool,
) -> tuple[Survives, ...]:
    """`common`: all ranks hold one step somewhere; `committed`: one is durable on all ranks;
    `spread`: one is left whichever node is lost; `archived`: one is in the archive.

    Whatever outlives a node outlives a pod of it. All pods of a job at once go with a new job, so
    copies with peers do not outlive that on volumes that go with their pod.
    """
    on_nodes = committed and volumes_outlive_pod(kinds)
    held = {
        Survives.CONTAINER_RESTART: common or committed,
        Survives.POD_RESTART: on_nodes or spread,
        Survives.NODE_LOSS: spread,
        Survives.JOB_RECREATE: labelled and (on_nodes or archived),
    }
    return tuple(one for one, outlived in held.items() if outlived)


@dataclass(frozen=True, slots=True)
class Lying:
    """One durable image of a rank, on a node's drive."""

    node: str
    rank: int
    held: ReportedShard


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
