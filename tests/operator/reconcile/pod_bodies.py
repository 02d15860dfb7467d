"""Training pods as the API server has them, and where they lie there."""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]


def pod_path(name: str, namespace: str = "team") -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def pod_body(node_rank: int = 0, *, injected: bool = True) -> Body:
    """A PyTorchJob's pod as the API server has it, after admission or without."""
    said = {
        "policy": "default",
        "generation": 1,
        "image": "keepstep/sidecar:0.1.0",
        "version": "0.1.0",
        "container": "pytorch",
        "job": {
            "api_version": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": "gpt",
            "uid": "1a2b3c4d-0000",
        },
    }
    labels = {"training.kubeflow.org/job-name": "gpt"}
    annotations = {"keepstep.dev/policy": "default"}
    if injected:
        labels |= {
            "keepstep.dev/injected": "true",
            "keepstep.dev/run-key": "gpt-1a2b3c4d",
            "keepstep.dev/node-rank": str(node_rank),
        }
        annotations["keepstep.dev/status"] = json.dumps(said)
    return {
        "metadata": {
            "name": f"gpt-worker-{node_rank}",
            "namespace": "team",
            "uid": f"pod-{node_rank}",
            "resourceVersion": "1",
            "creationTimestamp": "2026-11-21T07:00:00Z",
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": "gpt",
                    "uid": "1a2b3c4d-0000",
                    "controller": True,
                }
            ],
            "managedFields": [{"fieldsV1": {"f:metadata": {}}}],
        },
        "spec": {
            "nodeName": f"node-{node_rank}",
            "initContainers": [{"name": "keepstep-sidecar", "env": []}] if injected else [],
            "containers": [
                {
                    "name": "pytorch",
                    "image": "team/train:1",
                    "env": [{"name": "RANK", "value": str(node_rank)}],
                    "command": ["python", "train.py"],
                }
            ],
            "volumes": [
                {"name": "keepstep-memory", "emptyDir": {"medium": "Memory"}},
                {"name": "keepstep-volume-nvme0", "hostPath": {"path": "/mnt/nvme0"}},
            ],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "pytorch", "restartCount": 0, "state": {"running": {"startedAt": "x"}}}
            ],
        },
    }
