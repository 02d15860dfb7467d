"""Beyond the node: an archive, a buddy, and the loss of a node."""

from __future__ import annotations

import json
import pickle
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import jobs, runs, stores, tiers
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object


def test_a_job_made_anew_goes_on_from_the_archive(
    namespace: Kubectl, reference: dict[int, str], record_property: runs.Record
) -> None:
    stores.start(namespace)
    run = f"far-{int(time.time())}"
    job = jobs.pytorch_job(run=run)
    namespace.apply(jobs.policy(archive=stores.archive()), job)
    archived = tiers.beyond(namespace, "archive", 20)
    tiers.went(namespace)
    last = runs.the_run(namespace)["status"]["step"]

    namespace.apply(job)  # an emptyDir went with each pod: only the archive is left
    life = runs.restarted(namespace, within_s=240)
    assert life.tier == "archive"
    assert life.first - 1 >= archived
    runs.same_losses(life, reference)
    record_property("lost_steps", max(0, last - life.first + 1))


def test_an_archive_that_is_away_stops_nothing_and_catches_up(namespace: Kubectl) -> None:
    stores.start(namespace)
    namespace.apply(jobs.policy(archive=stores.archive()), jobs.pytorch_job())
    tiers.beyond(namespace, "archive", 5)
    namespace("scale", "deployment/s3", "--replicas=0")
    runs.becomes(namespace, "Archived", "False", within_s=150)
    at = runs.training_beyond(namespace, 0).last
    committed = runs.committed_beyond(namespace, at)
    namespace("scale", "deployment/s3", "--replicas=1")
    # its directory went with its pod: what is archived now was sent after it came back
    tiers.beyond(namespace, "archive", committed, within_s=240)


def test_another_number_of_replicas_goes_on_where_the_old_one_stopped(
    cluster: Cluster, namespace: Kubectl, record_property: runs.Record
) -> None:
    """From images of which the archive has in common what both replicas hold: they are large
    enough for that."""
    stores.start(namespace)
    args = ["--steps", "100000", "--log-file", "-", "--step-seconds", "0.5", *jobs.SMALL]
    job = jobs.pytorch_job(args=[*args, "--width", "320"])
    namespace.apply(jobs.policy(archive=stores.archive()), job)
    archived = tiers.beyond(namespace, "archive", 10)
    (store,) = namespace.list("pods", "app=s3")
    there = f"/var/lib/kubelet/pods/{store['metadata']['uid']}/volumes"
    # what the store makes and removes meanwhile `find` would fail for
    find = f"find {there} -name '*.twin-of-00000' 2>/dev/null; true"
    stored = cluster.on_node(store["spec"]["nodeName"], "sh", "-c", find)
    assert stored, "what both replicas hold is there once"
    _suspend(namespace, True)
    namespace.eventually(
        lambda: not namespace.list("pods", "keepstep.dev/injected"), within_s=150, what="no pods"
    )
    last = runs.status(namespace)["step"]
    wider = [{"op": "replace", "path": _REPLICAS, "value": 2}]
    namespace("patch", "pytorchjob", "gpt", "--type=json", "-p", json.dumps(wider))
    _suspend(namespace, False)

    life = runs.restarted(namespace, within_s=300)
    assert life.first - 1 >= archived
    namespace.eventually(lambda: runs.status(namespace)["world"] == 3, what="three ranks")
    assert runs.committed_beyond(namespace, life.first) > life.first
    record_property("lost_steps", max(0, last - life.first + 1))


_REPLICAS = "/spec/pytorchReplicaSpecs/Worker/replicas"


def _suspend(kubectl: Kubectl, suspend: bool) -> None:
    body = {"spec": {"runPolicy": {"suspend": suspend}}}
    kubectl("patch", "pytorchjob", "gpt", "--type=merge", "-p", json.dumps(body))


# --- a node is lost -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Lost:
    """What a job did whose worker's node was lost: its master's life that ended, and the next one.
    `copied`: the newest step with a copy on another node before, -1 for none."""

    copied: int
    killed: jobs.Life
    life: jobs.Life


@pytest.fixture
def lost(
    cluster: Cluster, namespace: Kubectl, shared: Path, cluster_alone: None
) -> dict[str, _Lost]:
    """By the name of the job. The node is lost once, for all tests that ask for this."""
    found = shared / "node-lost.pickle"
    if not found.exists():
        found.write_bytes(pickle.dumps(_lost(cluster, namespace)))
    by_job: dict[str, _Lost] = pickle.loads(found.read_bytes())
    return by_job


def test_a_lost_node_with_a_buddy_costs_no_committed_step(
    lost: dict[str, _Lost], reference: dict[int, str], record_property: runs.Record
) -> None:
    one = lost["copied"]
    assert one.life.first - 1 >= one.copied > 0
    runs.same_losses(one.life, reference)
    record_property("lost_steps", runs.lost(one.killed, one.life))


def test_a_lost_node_whose_replica_is_left_costs_nothing_without_any_copy(
    lost: dict[str, _Lost], record_property: runs.Record
) -> None:
    one = lost["plain"]
    assert one.copied == -1
    record_property("lost_steps", runs.lost(one.killed, one.life))
    assert runs.lost(one.killed, one.life) <= 1


def _lost(cluster: Cluster, kubectl: Kubectl) -> dict[str, _Lost]:
    """Two jobs train, one of them with peers; the node of their workers is stopped (it is one
    without the reconciler that leads), and started again when both go on."""
    safe = cluster.leader()["spec"]["nodeName"]
    doomed = next(one for one in cluster.workers() if one != safe)
    kubectl.apply(
        jobs.policy("peers", peers={"replicas": 1}),
        jobs.policy(),
        _spread("copied", safe, doomed, policy="peers"),
        _spread("plain", safe, doomed, policy="default"),
    )
    names = ("copied", "plain")
    masters = {name: f"{name}-master-0" for name in names}
    for pod in masters.values():
        runs.training_beyond(kubectl, 20, pod=pod)
    runs.becomes(kubectl, "Replicated", job="copied")
    kubectl.eventually(
        lambda: "NodeLoss" in runs.status(kubectl, "plain")["survives"],
        what="the replica is enough",
    )
    copied = {name: tiers.watermark(kubectl, "peer", name) for name in names}
    before = {name: runs.training_beyond(kubectl, 20, pod=pod) for name, pod in masters.items()}
    try:
        _lose(cluster, kubectl, doomed, *(f"{name}-worker-0" for name in names))
        killed = {name: runs.ended(kubectl, before[name], pod=pod) for name, pod in masters.items()}
        return {
            name: _Lost(
                copied=copied[name],
                killed=killed[name],
                life=runs.restarted(kubectl, pod=pod, within_s=300),
            )
            for name, pod in masters.items()
        }
    finally:
        cluster.start_node(doomed)


def _spread(name: str, master: str, worker: str, *, policy: str) -> Object:
    """Two replicas, the master pinned to one node, the worker starting on the other; a pod leaves
    a lost node after seconds."""
    soon = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute",
         "tolerationSeconds": 5}
        for what in ("unreachable", "not-ready")
    ]  # fmt: skip
    job = jobs.pytorch_job(name, policy=policy, spec={"tolerations": soon})
    for replica, node in (("Master", master), ("Worker", worker)):
        spec = job["spec"]["pytorchReplicaSpecs"][replica]["template"]["spec"]
        preferred = {
            "weight": 100,
            "preference": {
                "matchExpressions": [
                    {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
                ]
            },
        }
        spec["affinity"] = {
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
        }
    return job


def _lose(cluster: Cluster, kubectl: Kubectl, node: str, *pods: str) -> None:
    """Stop a node, and do what an administrator (or the out-of-service taint) does then."""
    for pod in pods:
        body = kubectl.get("pod", pod)
        assert body is not None
        assert body["spec"]["nodeName"] == node
    subprocess.run(["docker", "stop", "-t", "1", node], check=True, capture_output=True)
    cluster.kubectl("wait", f"node/{node}", "--for=condition=Ready=Unknown", "--timeout=240s",
                    timeout_s=250)  # fmt: skip
    # a pod that is made just when its node is found lost may be made without admission, as its
    # Service still leads there, too; what is evicted comes later
    owner = jobs.owner(kubectl)
    jobs.all_inject(kubectl, owner)
    kubectl("delete", "pod", *pods, "--force", "--grace-period=0")
