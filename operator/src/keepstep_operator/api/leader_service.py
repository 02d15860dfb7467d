"""The address of a run's leader, the sidecar of node rank 0: a headless Service for each run.

Admission computes the name, and the operator makes the Service once. It selects node rank 0 whether
its pod is ready or not, since the leader serves before the trainer does. Pure.
"""

from __future__ import annotations

import hashlib
from typing import Final

from keepstep_operator import names
from keepstep_operator.object_body import Body

_LONGEST_NAME: Final = 63
_PREFIX: Final = "keepstep-"
_DIGITS: Final = 8


def service_name(run: str) -> str:
    """The name of the run's Service. It begins with a letter, as a Service's must."""
    if len(_PREFIX + run) <= _LONGEST_NAME:
        return _PREFIX + run
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGITS]
    kept = run[: _LONGEST_NAME - len(_PREFIX) - _DIGITS - 1].rstrip("-")
    return f"{_PREFIX}{kept}-{digest}"


def leader_address(namespace: str, run: str, port: int) -> str:
    """`host:port` of the leader, as pods of the cluster resolve it."""
    return f"{service_name(run)}.{namespace}.svc:{port}"


def service_body(namespace: str, run: str, *, port: int, owner: Body) -> Body:
    """The Service to create. It is deleted with its CheckpointRun, the `owner`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(run),
            "namespace": namespace,
            "labels": {names.RUN_KEY_LABEL: run, "app.kubernetes.io/managed-by": "keepstep"},
            "ownerReferences": [owner],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {
                names.INJECTED_LABEL: names.INJECTED,
                names.RUN_KEY_LABEL: run,
                names.NODE_RANK_LABEL: "0",
            },
            "ports": [{"name": "keepstep-peer", "port": port, "protocol": "TCP"}],
        },
    }
