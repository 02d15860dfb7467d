"""Runs, pods and reports as the reconciler sees them, short enough to read a case at one glance."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.run_reports import LossOutcome, MemberState, NodeReport, RunReport
from keepstep_operator.api.cluster_objects import Job, PodRecord, PolicyRecord, RunKey, RunObject
from keepstep_operator.api.policy import Policy, VolumeKind
from keepstep_operator.reconcile import run_transitions as transitions
from keepstep_operator.reconcile.run_transitions import Run

Body = dict[str, Any]

KEY = RunKey("team", "gpt-1a2b3c4d")
JOB = Job(api_version="kubeflow.org/v1", kind="PyTorchJob", name="gpt", uid="job-1")
T0 = 1_790_000_000.0
FIRST = Epoch(EpochId(1, "aaaaaaaa"))


def step(number: int, epoch: Epoch = FIRST) -> StepId:
    return StepId(epoch.id, number)


def pod(node_rank: int = 0, *, life: int = 1, **changes: Any) -> PodRecord:
    """Pod `gpt-worker-<node_rank>`; a new `life` is a new pod of that name."""
    record = PodRecord(
        uid=f"pod-{node_rank}-{life}",
        namespace=KEY.namespace,
        name=f"gpt-worker-{node_rank}",
        injected=True,
        run=KEY,
        node_rank=node_rank,
        node=f"node-{node_rank}",
        phase="Running",
        created_at=f"2026-11-21T07:{life:02d}:00Z",
        address=f"10.0.0.{node_rank + 1}",
        training_since=T0 - 600,
        volumes=(VolumeKind.HOST_PATH,),
        policy="default",
        policy_generation=1,
        sidecar_image="keepstep/sidecar:0.1.0",
        job=JOB,
    )
    return replace(record, **changes)


def accepted(**changes: Any) -> Policy:
    plain = Policy(
        namespace=KEY.namespace,
        name="default",
        generation=1,
        memory_limit_bytes=1 << 30,
        volumes=(),
        spec={},
    )
    return replace(plain, **changes)


def policy(*, problem: tuple[str, str] | None = None, **changes: Any) -> PolicyRecord:
    held = accepted(**changes)
    return PolicyRecord(
        namespace=held.namespace,
        name=held.name,
        generation=held.generation,
        policy=None if problem else held,
        problem=problem,
    )


def run_object(**changes: Any) -> RunObject:
    return replace(RunObject(key=KEY, uid="run-1"), **changes)


def report(committed: int | None = 100, *, sequence: int = 2, **changes: Any) -> RunReport:
    """A healthy run of two pods with a rank each, which is a step ahead of its commit."""
    held = None if committed is None else step(committed)
    plain = RunReport(
        leader="leader-1",
        sequence=sequence,
        world=2,
        alive=2,
        known=2,
        settled=True,
        epochs=(FIRST,),
        step=None if committed is None else committed + 1,
        behind=None if committed is None else 1,
        committed=held,
        commits=() if held is None else (held,),
        safe=LossOutcome(restart=held),
        sidecar="0.1.0",
        library="0.1.0",
        nodes=tuple(node(rank) for rank in (0, 1)),
    )
    return replace(plain, **changes)


def node(rank: int, **changes: Any) -> NodeReport:
    plain = NodeReport(
        node_rank=rank,
        pod=f"pod-{rank}-1",
        node=f"node-{rank}",
        state=MemberState.CONNECTED,
        ranks=str(rank),
    )
    return replace(plain, **changes)


def begun(*pods: PodRecord, known: PolicyRecord | None = None) -> Run:
    """A run with these pods, its object and its policy, before the first report."""
    run = transitions.run_object_seen(Run(key=KEY, since=T0), run_object())
    for record in pods or (pod(0), pod(1)):
        run = transitions.pod_seen(run, record, at=T0)
    return transitions.policy_seen(run, known or policy())


def reported(run: Run, report_: RunReport | None = None, *, at: float = T0) -> Run:
    """The run after a report of its leader."""
    return transitions.apply_report(run, report_ or report(), at=at)


# Training pods as the API server has them, and where they lie there.


def pod_path(name: str, namespace: str = "team") -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def pod_body(node_rank: int = 0, *, injected: bool = True) -> Body:
    """A PyTorchJob's pod as the API server has it, after admission or without."""
    written = {
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
        annotations["keepstep.dev/status"] = json.dumps(written)
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
            "podIP": f"10.0.0.{node_rank + 1}",
            "containerStatuses": [
                {
                    "name": "pytorch",
                    "restartCount": 0,
                    "state": {"running": {"startedAt": "2026-11-21T07:00:30Z"}},
                }
            ],
        },
    }
