"""What a run would outlive now, from what it holds and where. Pure.

emptyDir and ephemeral volumes go with their pod, so they outlive containers only. A hostPath stays
on its node: a pod that comes back to that node finds it. Copies with peers lie on another node, the
archive on none. Another job finds any of it only under the same run key, which needs the user's
label (see docs/support-matrix.md, "What a run survives"). A rank whose image has twins (ranks that
hold the very same boxes) is there as long as one of them is.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

from keepstep.core.ledger.holding import is_full
from keepstep.steps import StepId
from keepstep_operator.api.policy import VolumeKind


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


def sole_nodes(by_node: Mapping[str, int], *, world: int) -> frozenset[str] | None:
    """Nodes that each hold the only copy of something of a step; None: it is not complete at all.

    `by_node`: ranks, as bits, of which the node's drives hold an image or a twin's, of this one
    step.
    """
    once = twice = 0
    for ranks in by_node.values():
        twice |= once & ranks
        once |= ranks
    if not is_full(once, world):
        return None
    sole = once & ~twice & ((1 << world) - 1)
    return frozenset(node for node, ranks in by_node.items() if ranks & sole)


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
