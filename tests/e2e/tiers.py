"""Jobs that use every tier, what lies on the nodes' drives, and the faults that nodes have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e import jobs, runs, stores
from tests.e2e.cluster import HOST_PATH, Cluster
from tests.e2e.kubectl import Kubectl, Object

POLICY = "all-tiers"
SIDECAR = runs.SIDECAR


def policy(path: str = HOST_PATH, *, archive_every: int = 10, kept: int = 2, **spec: Any) -> Object:
    """Memory, a directory of the node with the last `kept` steps, a buddy and an archive that
    forgets nothing."""
    body = jobs.policy(
        POLICY,
        host_path=True,
        peers={"replicas": 1},
        archive=stores.archive(every=archive_every),
        retention={"local": {"last": kept}, "archive": {"last": 1000}},
        **spec,
    )
    body["spec"]["volumes"][0]["hostPath"]["path"] = path
    return body


def job(master: str, worker: str, *, run: str, name: str = "gpt", **of_template: Any) -> Object:
    """A PyTorchJob of two replicas on these nodes, under a run label."""
    body = jobs.pytorch_job(name, policy=POLICY, run=run, **of_template)
    for kind, node in (("Master", master), ("Worker", worker)):
        spec = body["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return body


def watermark(kubectl: Kubectl, tier: str, job: str = "gpt") -> int:
    """The step of this tier's watermark, -1 for none."""
    mark = runs.status(kubectl, job).get("watermarks", {}).get(tier)
    return int(mark.rpartition("-")[2]) if mark else -1


def beyond(
    kubectl: Kubectl, tier: str, step: int, *, job: str = "gpt", within_s: float = 150.0
) -> int:
    """Wait until this tier's watermark is beyond `step`; the step."""

    def probe() -> Any:
        found = watermark(kubectl, tier, job)
        return found > step and found

    what = f"{tier} beyond step {step}"
    found: int = kubectl.eventually(probe, within_s=within_s, what=what)
    return found


def archived(kubectl: Kubectl) -> list[Object]:
    """Checkpoint objects whose step the archive holds, oldest first."""
    found = [
        body
        for body in kubectl.list("checkpoints")
        if "archive" in (body.get("status") or {}).get("tiers", ())
    ]
    return sorted(found, key=lambda body: str(body["spec"]["step"]))


def logged(kubectl: Kubectl, pod: str, *, previous: bool = False) -> list[Object]:
    """What a pod's sidecar logged."""
    log = kubectl.logs(pod, SIDECAR, previous=previous)
    lines = log.splitlines()
    # the last one may be half written
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def ended(kubectl: Kubectl, job: str = "gpt") -> None:
    """Delete the job and wait until its pods have flushed and are gone."""
    kubectl("delete", "pytorchjob", job, "--wait=true", timeout_s=400)
    kubectl.eventually(
        lambda: not kubectl.list("pods", "keepstep.dev/injected"), within_s=150, what="no pods"
    )


# --- on a node -----------------------------------------------------------------------------------


@contextmanager
def standing_still(
    cluster: Cluster, kubectl: Kubectl, pod: str, container: str = SIDECAR
) -> Iterator[None]:
    """A container gets no processor: all of its connections stay open, and nothing comes."""
    body = kubectl.get("pod", pod)
    assert body is not None, f"no pod {pod}"
    node, pid = cluster.process(body, container)
    cluster.on_node(node, "kill", "-STOP", pid)
    try:
        yield
    finally:
        cluster.on_node(node, "kill", "-CONT", pid)


def shards(cluster: Cluster, node: str, directory: str, *, copies: bool = False) -> list[str]:
    """Paths of the shards on a node below a run's directory, oldest step first: its own or those
    that it keeps for others. None where there is no such directory."""
    whose = "-path" if copies else "-not -path"
    found = _find(cluster, node, directory, f"{whose} '*/peers/*' -not -path '*/quarantine/*'")
    return sorted(found, key=lambda path: path.split("/")[-2])


def delete_copies(cluster: Cluster, node: str, directory: str) -> None:
    """Everything that a node keeps for others of this run is gone."""
    deleted = _find(cluster, node, f"{directory}/peers", "-print -delete")
    assert deleted, f"nothing was kept below {directory} of {node}"


def _find(cluster: Cluster, node: str, directory: str, rest: str) -> list[str]:
    """Shards, without those that a sidecar retires meanwhile: because of them `find` would fail."""
    script = f"find {directory} -name 'rank-*.safetensors' {rest} 2>/dev/null; true"
    return cluster.on_node(node, "sh", "-c", script).splitlines()


def rot(cluster: Cluster, node: str, path: str) -> None:
    """Other bytes in the middle of a file, at rest; its seal stays whole."""
    script = f'size=$(stat -c %s {path}); printf "rotten!" | dd of={path} bs=1 conv=notrunc ' + (
        "seek=$((size / 2)) 2>/dev/null"
    )
    cluster.on_node(node, "sh", "-c", script)


@contextmanager
def small_drive(
    cluster: Cluster, node: str, path: str, *, mib: int, number: int = 0
) -> Iterator[None]:
    """A file system of its own at this path of a node, gone afterwards. `number`: of several that
    are mounted there, one above the other."""
    image = f"{path}-{number}.img"
    cluster.on_node(node, "mkdir", "-p", path)
    cluster.on_node(node, "truncate", "-s", f"{mib}M", image)
    cluster.on_node(node, "mkfs.ext4", "-q", "-m", "0", image)
    cluster.on_node(node, "mount", "-o", "loop", image, path)
    try:
        yield
    finally:
        cluster.on_node(node, "umount", "--lazy", path)
        cluster.on_node(node, "rm", "-f", image)


def fill(cluster: Cluster, node: str, path: str) -> None:
    """Leave no byte of the file system at `path` free."""
    cluster.on_node(node, "sh", "-c", f"cat /dev/zero > {path}/full 2>/dev/null || true")


def free(cluster: Cluster, node: str, path: str) -> None:
    """Undo `fill`."""
    cluster.on_node(node, "rm", "-f", f"{path}/full")
