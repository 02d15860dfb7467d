"""What a run would outlive now, from what it holds and where.

emptyDir and ephemeral volumes go with their pod, so they outlive containers only. A hostPath stays
on its node: a pod that comes back to that node finds it. Another job finds it only under the same
run key, which needs the user's label (see docs/operations.md, "What survives").
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
    *, common: bool, committed: bool, kinds: Collection[VolumeKind], labelled: bool
) -> tuple[Survives, ...]:
    """`common`: all ranks hold one step somewhere; `committed`: one is durable on all ranks.

    No tier beyond the node exists yet, so nothing outlives the loss of a node.
    """
    outlived = [Survives.CONTAINER_RESTART] if common or committed else []
    if committed and volumes_outlive_pod(kinds):
        outlived.append(Survives.POD_RESTART)
        if labelled:
            outlived.append(Survives.JOB_RECREATE)
    return tuple(outlived)
