"""What a run would survive now, given what it holds and where. Pure.

emptyDir and ephemeral volumes are lost with their pod, so they survive container restarts only. A
hostPath stays on its node, and a pod that comes back to that node finds it. Peers keep copies on
another node; the archive is on no node. Another job finds any of these only under the same run key,
which needs the user's label (see docs/support-matrix.md, "What a run survives").
"""

from __future__ import annotations

import enum
from collections.abc import Collection

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
