"""What a run would outlive now, from what it holds and where.

emptyDir and ephemeral volumes go with their pod, so they outlive containers only. A hostPath stays
on its node: a pod that comes back to that node finds it. Copies with peers lie on another node, the
archive on none. Another job finds any of it only under the same run key, which needs the user's
label (see docs/support-matrix.md, "What a run survives").
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from keepstep_operator.reconcile.records import VolumeKind


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
