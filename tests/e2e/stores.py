"""An S3 store inside the cluster: one pod of versitygw over a directory that goes with it."""

from __future__ import annotations

from typing import Any

from tests.e2e.kubectl import Kubectl, Object

_IMAGE = "versity/versitygw:v1.8.0"
_KEYS = {"AWS_ACCESS_KEY_ID": "keepstep", "AWS_SECRET_ACCESS_KEY": "a-secret-of-this-test"}
BUCKET = "ckpt"
SECRET = "s3"
ENDPOINT = "http://s3:7070"


def objects() -> tuple[Object, ...]:
    """The store, its Service, and the Secret that its users need."""
    labels = {"app": "s3"}
    pod: Object = {
        "containers": [
            {
                "name": "s3",
                "image": _IMAGE,
                "imagePullPolicy": "IfNotPresent",
                "args": ["--port", ":7070", "posix", "/data"],
                "env": [
                    {"name": "ROOT_ACCESS_KEY", "value": _KEYS["AWS_ACCESS_KEY_ID"]},
                    {"name": "ROOT_SECRET_KEY", "value": _KEYS["AWS_SECRET_ACCESS_KEY"]},
                ],
                "readinessProbe": {"tcpSocket": {"port": 7070}, "periodSeconds": 1},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
        "initContainers": [
            {  # a directory is a bucket
                "name": "bucket",
                "image": "keepstep.test/busybox:1",
                "imagePullPolicy": "IfNotPresent",
                "command": ["mkdir", "-p", f"/data/{BUCKET}"],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "terminationGracePeriodSeconds": 1,
    }
    return (
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "s3"},
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "s3"},
            "spec": {"selector": labels, "ports": [{"port": 7070}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": SECRET},
            "stringData": dict(_KEYS),
        },
    )


def start(kubectl: Kubectl, **spec: Any) -> None:
    """Make it and wait until it answers. `spec`: of its pod, for example a nodeSelector."""
    deployment, *others = objects()
    deployment["spec"]["template"]["spec"] |= spec
    kubectl.apply(deployment, *others)
    kubectl("rollout", "status", "deployment/s3", "--timeout=240s", timeout_s=250)


def archive(*, every: int = 10) -> Object:
    """`spec.archive` of a policy that uses it."""
    return {
        "every": every,
        "s3": {
            "bucket": BUCKET,
            "prefix": "runs",
            "endpoint": ENDPOINT,
            "region": "us-east-1",
            "credentialsSecretRef": {"name": SECRET},
        },
    }
