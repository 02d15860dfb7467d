"""Pods as job controllers make them (training operator 1.9, JobSet 0.8), and policies."""

from __future__ import annotations

from typing import Any

from keepstep_operator.api.policy import Policy, parse_policy
from keepstep_operator.injection import InjectionDefaults

NAMESPACE = "team-a"
JOB_UID = "3f6a1f0e-8c1d-4f0e-9d0a-2f6f0a4b7c11"

DEFAULTS = InjectionDefaults(
    sidecar_image="registry.example/keepstep/sidecar:0.1.0",
    reports_url="https://keepstep-reports.keepstep-system.svc:443",
    reports_ca="-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    host_paths=("/mnt/nvme0", "/var/lib/keepstep"),
    version="0.1.0",
)

EMPTY_DIR = {"name": "scratch", "emptyDir": {"sizeLimit": "100Gi"}}
HOST_PATH = {"name": "nvme0", "hostPath": {"path": "/mnt/nvme0/keepstep"}, "capacity": "400Gi"}
EPHEMERAL = {"name": "claim", "ephemeral": {"size": "200Gi", "storageClassName": "local"}}


def policy_body(*volumes: dict[str, Any], name: str = "default", **spec: Any) -> dict[str, Any]:
    """A CheckpointPolicy object; the default volume is an emptyDir."""
    return {
        "apiVersion": "keepstep.dev/v1alpha1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": name, "namespace": NAMESPACE, "generation": 3},
        "spec": {
            "memory": {"limit": "2Gi", "slots": 4},
            "volumes": list(volumes) or [EMPTY_DIR],
            **spec,
        },
    }


def policy(*volumes: dict[str, Any], **spec: Any) -> Policy:
    return parse_policy(policy_body(*volumes, **spec))


def owner(kind: str, name: str, *, api_version: str, uid: str = JOB_UID) -> dict[str, Any]:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _container(name: str, *env: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One that satisfies Pod Security "restricted" by itself."""
    return {
        "name": name,
        "image": "registry.example/train:1",
        "command": ["torchrun", "train.py"],
        "env": list(env),
        "resources": {
            "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
            "limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
        },
        "volumeMounts": [
            {
                "name": "kube-api-access-x7k2p",
                "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
                "readOnly": True,
            }
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **more,
    }


def _token_volume() -> dict[str, Any]:
    sources = [{"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}]
    return {"name": "kube-api-access-x7k2p", "projected": {"defaultMode": 420, "sources": sources}}


def _pod(metadata: dict[str, Any], *containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    annotations = {"keepstep.dev/policy": "default", **metadata.pop("annotations", {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, **metadata, "annotations": annotations},
        "spec": {
            "containers": list(containers),
            "volumes": [_token_volume()],
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 30,
            "serviceAccountName": "default",
            "securityContext": {},
            **spec,
        },
        "status": {"phase": "Pending"},
    }


def pytorch_job(role: str = "worker", *, rank: int = 1, **spec: Any) -> dict[str, Any]:
    """The training operator names its pods, writes ranks into env, and lets workers wait for the
    master in an init container."""
    waits = _container("init-pytorch", image="alpine:3.10")
    return _pod(
        {
            "name": f"gpt-{role}-0",
            "labels": {
                "training.kubeflow.org/job-name": "gpt",
                "training.kubeflow.org/replica-type": role,
                "training.kubeflow.org/replica-index": "0",
            },
            "ownerReferences": [owner("PyTorchJob", "gpt", api_version="kubeflow.org/v1")],
        },
        _container("logger"),
        _container(
            "pytorch",
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "MASTER_PORT", "value": "23456"},
            {"name": "MASTER_ADDR", "value": "gpt-master-0"},
            {"name": "WORLD_SIZE", "value": "2"},
            {"name": "RANK", "value": str(rank)},
            {"name": "PET_NPROC_PER_NODE", "value": "1"},
            {"name": "PET_NODE_RANK", "value": str(rank)},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        ),
        initContainers=[waits] if role == "worker" else [],
        **spec,
    )


def indexed_job(*, index: int = 3) -> dict[str, Any]:
    """The Job controller gives a generateName, and the index as annotation, label and env."""
    field = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    return _pod(
        {
            "generateName": f"bert-{index}-",
            "labels": {
                "batch.kubernetes.io/job-name": "bert",
                "batch.kubernetes.io/job-completion-index": str(index),
            },
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [owner("Job", "bert", api_version="batch/v1")],
        },
        _container("train", {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": field}}),
    )


def job_set(*, job: int = 2, index: int = 1) -> dict[str, Any]:
    pod = indexed_job(index=index)
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "llama",
        "jobset.sigs.k8s.io/jobset-uid": "aa11bb22-0000-4000-8000-000000000000",
        "jobset.sigs.k8s.io/replicatedjob-name": "workers",
        "jobset.sigs.k8s.io/job-index": str(job),
        "jobset.sigs.k8s.io/job-global-index": str(job),
    }
    pod["metadata"]["labels"].update(labels)
    pod["metadata"]["annotations"].update(labels)
    pod["metadata"]["ownerReferences"] = [
        owner("Job", f"llama-workers-{job}", api_version="batch/v1")
    ]
    return pod


def train_job() -> dict[str, Any]:
    """Trainer v2: a JobSet of the TrainJob's name, whose training container is `node`."""
    pod = job_set(job=0, index=0)
    pod["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
    pod["spec"]["containers"] = [_container("fetch"), _container("node")]
    return pod


def ray_worker(*, replica: int = 1, host: int | None = None) -> dict[str, Any]:
    """As KubeRay 1.6 makes it for a RayCluster (`BuildPod`, `DefaultWorkerPodTemplate`): with a
    host where a replica has several, shared memory of its own, and an init container."""
    labels = {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": "llama-raycluster-9x7wq",
        "ray.io/node-type": "worker",
        "ray.io/group": "gpu",
        "ray.io/identifier": "llama-raycluster-9x7wq-worker",
        "ray.io/worker-group-replica-index": str(replica),
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    if host is not None:
        labels["ray.io/worker-group-replica-name"] = "gpu-4kx2p"
        labels["ray.io/replica-host-index"] = str(host)
    metadata = {
        "generateName": "llama-raycluster-9x7wq-gpu-worker-",
        "labels": labels,
        "annotations": {"ray.io/ft-enabled": "false"},
        "ownerReferences": [owner("RayCluster", "llama-raycluster-9x7wq", api_version="ray.io/v1")],
    }
    head = "llama-raycluster-9x7wq-head-svc.team-a.svc.cluster.local"
    field = {"fieldRef": {"fieldPath": "metadata.labels['ray.io/group']"}}
    environment = [
        {"name": "FQ_RAY_IP", "value": head},
        {"name": "RAY_IP", "value": "llama-raycluster-9x7wq-head-svc"},
        {"name": "RAY_NODE_TYPE_NAME", "valueFrom": field},
        {"name": "RAY_PORT", "value": "6379"},
        {"name": "RAY_ADDRESS", "value": f"{head}:6379"},
    ]
    worker = _container("ray-worker", *environment)
    worker["volumeMounts"].append({"name": "shared-mem", "mountPath": "/dev/shm"})
    shared = {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    waits = _container("wait-gcs-ready", *environment[:2])
    pod = _pod(metadata, worker, _container("logger"), initContainers=[waits])
    pod["spec"]["volumes"].append(shared)
    return pod


def bare_pod(name: str = "try") -> dict[str, Any]:
    return _pod({"name": name, "labels": {}}, _container("main"))


ALL = {
    "PyTorchJob master": lambda: pytorch_job("master", rank=0),
    "PyTorchJob worker": pytorch_job,
    "Indexed Job": indexed_job,
    "JobSet": job_set,
    "TrainJob": train_job,
    "RayCluster": ray_worker,
    "bare pod": bare_pod,
}


def named(listed: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in listed if entry["name"] == name)


def sidecar_of(pod: dict[str, Any]) -> dict[str, Any]:
    return named(pod["spec"]["initContainers"], "keepstep-sidecar")


def environment_of(container: dict[str, Any]) -> dict[str, Any]:
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom"))
        for variable in container["env"]
    }
