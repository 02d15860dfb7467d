"""A node is lost, with trainers, copies, a run's leader and the reconciler; then it comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster, run
from tests.e2e.kubectl import Kubectl, Object


@pytest.fixture
def doomed(cluster: Cluster, cluster_alone: None) -> Iterator[str]:
    """The reconciler's node; it is started again."""
    node = str(cluster.reconciler()["spec"]["nodeName"])
    yield node
    cluster.start_node(node)


def test_losing_a_node_loses_no_more_steps_than_guaranteed_and_runs_resume(
    cluster: Cluster,
    new_namespace: Callable[[str], Kubectl],
    doomed: str,
    reference: dict[int, str],
    record_property: runs.Record,
) -> None:
    """Four jobs: one whose master (node rank 0, which leads the run) has a buddy elsewhere, one
    without copies whose other replica is left, one that was nowhere near, and one that was there
    with all of its pods."""
    safe = next(node for node in cluster.workers() if node != doomed)
    copied, plain, far, there = map(new_namespace, ("copied", "plain", "far", "there"))
    copied.apply(jobs.policy(peers={"replicas": 1}), _spread(master=doomed, worker=safe))
    plain.apply(jobs.policy(), _spread(master=safe, worker=doomed))
    far.apply(jobs.policy(), jobs.pytorch_job(workers=0, spec=_on(safe)))
    there.apply(jobs.policy(), jobs.pytorch_job(spec=_on(doomed)))
    for namespace in (copied, plain, far, there):
        runs.committed_beyond(namespace, 10)
    runs.becomes(copied, "Replicated")
    plain.eventually(
        lambda: "NodeLoss" in runs.status(plain)["survives"], what="the replica is enough"
    )
    before = {kubectl: runs.training_beyond(kubectl, 10) for kubectl in (copied, plain, there)}
    step = int(runs.status(copied)["watermarks"]["peer"].rpartition("-")[2])
    there_too = {copied: "gpt-master-0", plain: "gpt-worker-0"}
    for namespace, pod in there_too.items():
        assert _node(namespace, pod) == doomed

    lost_at = time.monotonic()
    run("docker", "kill", doomed)
    last = runs.training_beyond(far, 0).last
    runs.committed_beyond(far, last)
    away_s = time.monotonic() - lost_at
    record_property("seconds", round(away_s, 1))
    assert runs.training_beyond(far, last).first == 0, "the trainers never ended"

    _pods_leave(cluster, doomed, there_too)
    killed = runs.ended(plain, before[plain])
    life = runs.restarted(copied, within_s=300)
    assert life.first - 1 >= step > 0, "the peers' watermark"
    if "random generators is out of reach" not in copied.logs("gpt-master-0", "pytorch"):
        runs.same_losses(life, reference)  # else it goes on from the other replica's newer step
    record_property("lost_steps", max(0, before[copied].last - (life.first - 1)))
    runs.committed_beyond(copied, life.first)
    life = runs.restarted(plain, within_s=240)
    assert runs.lost(killed, life) <= 1, "without any copy"

    cluster.start_node(doomed)
    life = runs.restarted(there, within_s=240)
    assert life.began_at > before[there].began_at
    assert life.first > 10, "an emptyDir outlives a restart of its node"


def _on(node: str) -> Object:
    return {"nodeSelector": {"kubernetes.io/hostname": node}}


def _node(kubectl: Kubectl, pod: str) -> str:
    body = kubectl.get("pod", pod)
    assert body is not None
    return str(body["spec"]["nodeName"])


def _spread(*, master: str, worker: str) -> Object:
    """Two replicas that start on these nodes; a pod leaves a lost node after seconds."""
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


def _pods_leave(cluster: Cluster, node: str, pods: Mapping[Kubectl, str]) -> None:
    """What an administrator (or the out-of-service taint) does for pods of a node that is lost."""
    cluster.kubectl("wait", f"node/{node}", "--for=condition=Ready=Unknown", "--timeout=240s",
                    timeout_s=250)  # fmt: skip
    # a pod that is made just when its node is found lost may be made without admission, as its
    # Service still leads there, too; what is evicted comes later
    survivor = next(iter(pods))
    jobs.all_inject(survivor, jobs.owner(survivor))
    for kubectl, pod in pods.items():
        kubectl("delete", "pod", pod, "--force", "--grace-period=0")
