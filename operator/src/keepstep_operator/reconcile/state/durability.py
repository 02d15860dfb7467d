"""What a run would survive now, given what it holds and where. Pure.

emptyDir and ephemeral volumes are lost with their pod, so they survive container restarts only. A
hostPath stays on its node, and a pod that comes back to that node finds it. Peers keep copies on
another node; the archive is on no node. Another job finds any of these only under the same run key,
which needs the user's label (see docs/support-matrix.md, "What a run survives"). A rank whose image
has twins (images of other ranks with the very same boxes) can be restored as long as one of the
twins exists.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

from keepstep.core.commit_rule import is_full
from keepstep.steps import StepId
from keepstep_operator.api.policy import VolumeKind


class Survives(str, enum.Enum):
    """Events that a run may survive. Users see the values."""

    CONTAINER_RESTART = "ContainerRestart"
    POD_RESTART = "PodRestart"
    NODE_LOSS = "NodeLoss"
    JOB_RECREATE = "JobRecreate"

    def __str__(self) -> str:
        return self.value


def volumes_outlive_pod(kinds: Collection[VolumeKind]) -> bool:
    """Whether all volumes of a pod outlive it. All must, since its ranks are spread over them."""
    return bool(kinds) and all(kind is VolumeKind.HOST_PATH for kind in kinds)


def survives(
    *,
    common: bool,
    committed: bool,
    spread: bool,
    apart: bool,
    archived: bool,
    kinds: Collection[VolumeKind],
    labelled: bool,
) -> tuple[Survives, ...]:
    """The events that the run would survive now.

    `common`: there is a step that a restart goes on from. `committed`: a step is durable on all
    ranks. `spread`: a step is left whichever single node is lost; `apart`: the same for each pod
    with its volumes. `archived`: a step is in the archive.

    What survives the loss of a node also survives the loss of a pod. A new job replaces all pods at
    once, so copies on peers do not survive it if they lie on volumes that are lost with their pod.
    """
    on_nodes = committed and volumes_outlive_pod(kinds)
    held = {
        Survives.CONTAINER_RESTART: common or committed,
        Survives.POD_RESTART: on_nodes or spread or apart,
        Survives.NODE_LOSS: spread,
        Survives.JOB_RECREATE: labelled and (on_nodes or archived),
    }
    return tuple(one for one, outlived in held.items() if outlived)


Sole: TypeAlias = "frozenset[str] | None"


def sole_nodes(by_node: Mapping[str, int], *, world: int) -> Sole:
    """The nodes that each hold the only copy of some part of a step; None: the step is incomplete.

    `by_node`: for each node, the ranks, as bits, of which its drives hold an image of this step, or
    a twin's image.
    """
    once = twice = 0
    for ranks in by_node.values():
        twice |= once & ranks
        once |= ranks
    if not is_full(once, world):
        return None
    sole = once & ~twice & ((1 << world) - 1)
    return frozenset(node for node, ranks in by_node.items() if ranks & sole)


def least_left(newest_first: Iterable[tuple[StepId, Sole, Sole]]) -> StepId | None:
    """The step that a restart goes on from at the least, whichever single node is lost.

    By step: `sole_nodes` where twins count, and where they do not. A restart leaves out a step in
    which twins stand in for ranks that have their own images of an older complete step
    (`keepstep.core.ledger.Ledger.whole`).
    """
    with_twins: dict[StepId, Sole] = {}
    alone: dict[StepId, Sole] = {}
    for id, with_twins[id], own in newest_first:
        alone[id] = own
        if own == frozenset():
            break  # no older step decides
    nodes = _named(with_twins) | _named(alone) | {""}  # "": any node that no step needs
    left = _left(with_twins, nodes) | _left(alone, nodes)
    return min(left.values()) if left.keys() == nodes else None


def refuges(sole: Mapping[StepId, Sole]) -> frozenset[StepId]:
    """For each node, the newest step that survives its loss. `sole`: `sole_nodes` of each step."""
    return frozenset(_left(sole, _named(sole)).values())


def _named(sole: Mapping[StepId, Sole]) -> frozenset[str]:
    return frozenset().union(*(nodes for nodes in sole.values() if nodes))


def _left(sole: Mapping[StepId, Sole], unspared: frozenset[str]) -> dict[str, StepId]:
    """By node, the newest step that survives its loss, of those that have one."""
    found: dict[str, StepId] = {}
    for id in sorted(sole, reverse=True):
        if (nodes := sole[id]) is not None:
            found |= dict.fromkeys(unspared - nodes, id)
            unspared &= nodes
    return found
