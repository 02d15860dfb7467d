"""The control plane is away: ours, or the cluster's own. Training does not notice."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.e2e import jobs, runs
from tests.e2e.cluster import NAMESPACE, RECONCILE, Cluster, run
from tests.e2e.kubectl import Kubectl


def test_pods_restart_by_agreement_while_the_operator_is_down(
    cluster: Cluster,
    turn_alone: None,
    training: Kubectl,
    reference: dict[int, str],
    record_property: runs.Record,
) -> None:
    namespace = training
    committed = runs.committed_beyond(namespace, 10)
    system = cluster.kubectl.namespaced(NAMESPACE)
    system("scale", "deployment/keepstep-reconcile", "--replicas=0")
    try:
        system.eventually(
            lambda: not system.list("pods", RECONCILE),
            what="the reconciler is gone",
        )
        before = runs.training_beyond(namespace, committed + 20)
        runs.kill_trainer(cluster, namespace, "gpt-worker-0")
        killed = runs.ended(namespace, before)
        life = runs.restarted(namespace)
        assert life.tier == "memory"
        assert life.first - 1 >= before.last - 2
        runs.same_losses(life, reference)
        record_property("lost_steps", runs.lost(killed, life))
    finally:
        system("scale", "deployment/keepstep-reconcile", "--replicas=2")
    after = runs.committed_beyond(namespace, life.first)
    assert after > committed
    runs.becomes(namespace, "Protected")


def test_a_reconciler_killed_again_and_again_mid_write_converges(
    cluster: Cluster, training: Kubectl, turn_alone: None
) -> None:
    namespace = training
    committed = runs.committed_beyond(namespace, 5)
    before = runs.status(namespace)
    chance = random.Random(4)
    for _ in range(3):
        # while a job trains it writes at least every other second
        written = runs.the_run(namespace)["metadata"]["resourceVersion"]
        namespace.eventually(
            lambda seen=written: runs.the_run(namespace)["metadata"]["resourceVersion"] != seen,
            within_s=120,
            what="the reconciler writes",
        )
        time.sleep(chance.random() * 2)  # any moment between two writes, or in one
        _kill_reconciler(cluster)

    assert runs.committed_beyond(namespace, committed) > committed
    after = runs.status(namespace)
    assert after["world"] == before["world"] == 2
    assert after["epoch"] == before["epoch"]
    assert len(namespace.list("ckrun")) == 1


def test_writes_are_bounded_by_time_not_by_steps(training: Kubectl) -> None:
    namespace = training
    name = runs.the_run(namespace)["metadata"]["name"]
    began = time.monotonic()
    with namespace.watching("ckrun", name) as versions:
        first = runs.training_beyond(namespace, 0).last
        last = runs.training_beyond(namespace, first + 80).last
    seconds, wrote = time.monotonic() - began, len(versions) - 1  # the first is what was there
    assert last - first >= 80
    assert 1 <= wrote <= seconds / 2 + 2, f"{wrote} writes in {seconds:.0f} s"


def _kill_reconciler(cluster: Cluster) -> None:
    pod = cluster.leader()
    (container,) = [one["name"] for one in pod["spec"]["containers"]]
    cluster.kill_container(pod, container)


@pytest.fixture
def leaders_node(cluster: Cluster) -> Iterator[str]:
    """The worker that the reconciler that leads is on, and no other one; it is started again."""
    system = cluster.kubectl.namespaced(NAMESPACE)
    # replicas that met on one node, when another one was lost, stay there until they are made anew
    system("rollout", "restart", "deployment/keepstep-reconcile")
    system("rollout", "status", "deployment/keepstep-reconcile", "--timeout=240s", timeout_s=250)
    system.eventually(lambda: _apart(system), what="two reconcilers on two nodes")
    node = str(cluster.leader()["spec"]["nodeName"])
    yield node
    cluster.start_node(node)


def test_a_lost_node_takes_commits_across_pods_away_for_half_a_minute(
    cluster: Cluster,
    namespace: Kubectl,
    cluster_alone: None,
    leaders_node: str,
    record_property: runs.Record,
) -> None:
    """Another replica takes the Lease, and the sidecars find it."""
    safe = next(one for one in cluster.workers() if one != leaders_node)
    job = jobs.pytorch_job()
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": safe}
    namespace.apply(jobs.policy(), job)
    runs.committed_beyond(namespace, 5)
    lost_at = time.monotonic()
    run("docker", "kill", leaders_node)
    last = runs.training_beyond(namespace, 0).last
    runs.committed_beyond(namespace, last)
    away_s = time.monotonic() - lost_at
    record_property("seconds", round(away_s, 1))
    assert away_s <= 30
    assert runs.training_beyond(namespace, last).first == 0, "the trainers never ended"


def _apart(system: Kubectl) -> bool:
    pods = system.list("pods", RECONCILE)
    return len(pods) == 2 == len({pod["spec"].get("nodeName") for pod in pods})


def test_etcd_and_the_api_server_are_killed_and_nothing_stops(
    cluster: Cluster, training: Kubectl, turn_alone: None
) -> None:
    namespace = training
    committed = runs.committed_beyond(namespace, 5)
    before = runs.training_beyond(namespace, 0).last
    (control_plane,) = [node for node in cluster.nodes() if "control-plane" in node]
    pids = cluster.on_node(control_plane, "pgrep", "-x", "kube-apiserver|etcd").split()
    cluster.on_node(control_plane, "kill", "-9", *pids)
    namespace.eventually(lambda: namespace.list("pods"), what="it answers again")
    assert runs.committed_beyond(namespace, committed) > committed
    assert runs.training_beyond(namespace, before + 20).first == 0, "the trainers never ended"


def test_an_api_server_that_stands_still_for_a_minute_stops_nothing(
    cluster: Cluster, training: Kubectl, turn_alone: None
) -> None:
    namespace = training
    committed = runs.committed_beyond(namespace, 5)
    (control_plane,) = [node for node in cluster.nodes() if "control-plane" in node]
    first = runs.training_beyond(namespace, 0).last
    pids = cluster.on_node(control_plane, "pgrep", "-x", "kube-apiserver|etcd").split()
    cluster.on_node(control_plane, "kill", "-STOP", *pids)
    try:
        assert not _answers(cluster), "the API server stands still"
        cluster.on_node(control_plane, "sleep", "60")
    finally:
        cluster.on_node(control_plane, "kill", "-CONT", *pids)
    namespace.eventually(lambda: namespace.list("pods"), what="it answers again")
    assert runs.committed_beyond(namespace, committed) > committed
    assert runs.training_beyond(namespace, first + 100).first == 0, "the trainers never ended"


def _answers(cluster: Cluster) -> bool:
    done = cluster.kubectl.attempt("get", "--raw", "/readyz", "--request-timeout=3s", timeout_s=30)
    return done.returncode == 0
