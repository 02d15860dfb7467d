"""What a run would survive now, given what it holds and where. Pure.

emptyDir and ephemeral volumes are lost with their pod, so they survive container restarts only. A
hostPath stays on its node, and a pod that comes back to that node finds it. Peers keep copies on
another node; the archive is on no node. Another job finds any of these only under the same run key,
which needs the user's label (see docs/support-matrix.md, "What a run survives").
"""

from __future__ import annotations

import enum

from keepstep_operator.reconcile.run_transitions import Run


class Survives(str, enum.Enum):
    """Events that a run may survive. Users see the values."""

    CONTAINER_RESTART = "ContainerRestart"
    POD_RESTART = "PodRestart"
    NODE_LOSS = "NodeLoss"
    JOB_RECREATE = "JobRecreate"


def find_survivable_failures(run: Run) -> tuple[Survives, ...]:
    """The events that the run would survive now. What survives the loss of a node also survives the
    loss of a pod. A new job replaces all pods at once, so copies on peers do not survive it if they
    lie on volumes that are lost with their pod."""
    if run.report is None:
        return ()
    safe, committed = run.report.safe, run.report.committed is not None
    on_nodes = committed and run.volumes_outlive_pod
    held = {
        Survives.CONTAINER_RESTART: committed or safe.restart is not None,
        Survives.POD_RESTART: on_nodes or safe.node is not None or safe.pod is not None,
        Survives.NODE_LOSS: safe.node is not None,
        Survives.JOB_RECREATE: run.labelled and (on_nodes or safe.archived is not None),
    }
    return tuple(failure for failure, outlived in held.items() if outlived)
