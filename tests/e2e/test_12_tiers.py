"""Beyond the node: an archive, a buddy, and the loss of a node."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.e2e import jobs, runs, stores
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object


def test_a_job_made_anew_goes_on_from_the_archive(
    namespace: Kubectl, reference: dict[int, str], record_property: runs.Record
) -> None:
    stores.start(namespace)
    run = f"far-{int(time.time())}"
    job = jobs.pytorch_job(run=run)
    namespace.apply(jobs.policy(archive=stores.archive()), job)
    archived = _archived_beyond(namespace, 20)
    namespace("delete", "pytorchjob", "gpt", "--wait=true", timeout_s=400)
    namespace.eventually(
        lambda: not namespace.list("pods", "keepstep.dev/injected"), within_s=150, what="no pods"
    )
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
    _archived_beyond(namespace, 5)
    namespace("scale", "deployment/s3", "--replicas=0")
    runs.becomes(namespace, "Archived", "False", within_s=150)
    at = runs.training_beyond(namespace, 0).last
    committed = runs.committed_beyond(namespace, at)
    namespace("scale", "deployment/s3", "--replicas=1")
    # its directory went with its pod: what is archived now was sent after it came back
    _archived_beyond(namespace, committed, within_s=240)


def test_another_number_of_replicas_goes_on_where_the_old_one_stopped(
    cluster: Cluster, namespace: Kubectl, record_property: runs.Record
) -> None:
    """From images of which the archive has in common what both replicas hold: they are large
    enough for that."""
    stores.start(namespace)
    args = ["--steps", "100000", "--log-file", "-", "--step-seconds", "0.5", *jobs.SMALL]
    job = jobs.pytorch_job(args=[*args, "--width", "320"])
    namespace.apply(jobs.policy(archive=stores.archive()), job)
    archived = _archived_beyond(namespace, 10)
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


def _archived_beyond(kubectl: Kubectl, step: int, *, within_s: float = 150.0) -> int:
    def look() -> object:
        found = _newest(kubectl, "archive")
        return found > step and found

    found: int = kubectl.eventually(look, within_s=within_s, what=f"archived beyond step {step}")
    return found


# --- a node is lost -------------------------------------------------------------------------------


@pytest.fixture
def doomed(cluster: Cluster, cluster_alone: None) -> Iterator[str]:
    """A worker that the test may stop, without the reconciler; it is started again."""
    held = cluster.leader()["spec"]["nodeName"]
    node = next(one for one in cluster.workers() if one != held)
    yield node
    cluster.start_node(node)


def test_a_lost_node_with_a_buddy_costs_no_committed_step(
    cluster: Cluster,
    namespace: Kubectl,
    reference: dict[int, str],
    doomed: str,
    record_property: runs.Record,
) -> None:
    safe = next(one for one in cluster.workers() if one != doomed)
    namespace.apply(jobs.policy(peers={"replicas": 1}), _spread(safe, doomed))
    runs.training_beyond(namespace, 20)
    runs.becomes(namespace, "Replicated")
    before = _newest(namespace, "peer")
    _lose(cluster, namespace, doomed, "gpt-worker-0")
    last = runs.training_beyond(namespace, 0).last

    life = runs.restarted(namespace, within_s=300)
    assert life.first - 1 >= before
    runs.same_losses(life, reference)
    record_property("lost_steps", max(0, last - life.first + 1))


def test_a_lost_node_whose_replica_is_left_costs_nothing_without_any_copy(
    cluster: Cluster, namespace: Kubectl, doomed: str, record_property: runs.Record
) -> None:
    safe = next(one for one in cluster.workers() if one != doomed)
    namespace.apply(jobs.policy(), _spread(safe, doomed))
    runs.committed_beyond(namespace, 10)
    namespace.eventually(
        lambda: "NodeLoss" in runs.status(namespace)["survives"], what="the replica is enough"
    )
    before = runs.training_beyond(namespace, 20)
    _lose(cluster, namespace, doomed, "gpt-worker-0")
    killed = runs.ended(namespace, before)
    life = runs.restarted(namespace, within_s=240)
    record_property("lost_steps", runs.lost(killed, life))
    assert runs.lost(killed, life) <= 1


def _spread(master: str, worker: str) -> Object:
    """Two replicas, the master pinned to one node, the worker starting on the other; a pod leaves
    a lost node after seconds."""
    soon = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute",
         "tolerationSeconds": 5}
        for what in ("unreachable", "not-ready")
    ]  # fmt: skip
    job = jobs.pytorch_job(spec={"tolerations": soon})
    for name, node in (("Master", master), ("Worker", worker)):
        spec = job["spec"]["pytorchReplicaSpecs"][name]["template"]["spec"]
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


def _lose(cluster: Cluster, kubectl: Kubectl, node: str, pod: str) -> None:
    """Stop a node, and do what an administrator (or the out-of-service taint) does then."""
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
    kubectl("delete", "pod", pod, "--force", "--grace-period=0")


def _newest(kubectl: Kubectl, tier: str) -> int:
    """The step of this tier's watermark, -1 for none."""
    mark = runs.status(kubectl).get("watermarks", {}).get(tier)
    return int(mark.rpartition("-")[2]) if mark else -1
