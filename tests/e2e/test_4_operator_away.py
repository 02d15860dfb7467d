"""The control plane is away: ours, or the cluster's own. Training does not notice."""

from __future__ import annotations

import json
import random
import time

from tests.e2e import runs
from tests.e2e.cluster import NAMESPACE, RECONCILE, Cluster
from tests.e2e.kubectl import Kubectl


def test_a_killed_and_then_absent_reconciler_does_not_affect_a_run(
    cluster: Cluster,
    training: Kubectl,
    turn_alone: None,
    record_property: runs.Record,
) -> None:
    namespace = training
    before = runs.status(namespace)
    committed = _converges_although_killed(cluster, namespace)
    after = runs.status(namespace)
    assert after["world"] == before["world"] == 2
    assert after["epoch"] == before["epoch"]
    assert len(namespace.list("ckrun")) == 1

    system = cluster.kubectl.namespaced(NAMESPACE)
    system("scale", "deployment/keepstep-reconcile", "--replicas=0")
    try:
        system.eventually(
            lambda: not system.list("pods", RECONCILE),
            what="the reconciler is gone",
        )
        living = runs.training_beyond(namespace, committed + 20)
        assert living.first == 0, "the trainers never ended"
        _commits_go_on(namespace)
        runs.kill_sidecar(cluster, namespace, "gpt-master-0")  # which leads the run
        _commits_go_on(namespace)
        living = runs.training_beyond(namespace, 0)
        assert living.first == 0, "the trainers never ended"
        runs.kill_trainer(cluster, namespace, "gpt-worker-0")
        killed = runs.ended(namespace, living)
        life = runs.restarted(namespace)
        assert life.tier == "memory"
        assert life.first - 1 >= living.last - 2
        record_property("lost_steps", runs.lost(killed, life))
        _commits_go_on(namespace)
    finally:
        system("scale", "deployment/keepstep-reconcile", "--replicas=1")
    assert runs.committed_beyond(namespace, life.first) > committed
    runs.becomes(namespace, "Protected")


def _commits_go_on(namespace: Kubectl) -> None:
    """Both pods learn of newer commits, whatever is away."""
    for pod in ("gpt-master-0", "gpt-worker-0"):
        (before,) = namespace.eventually(
            lambda pod=pod: (_committed(namespace, pod),), what=f"an answer of {pod}'s sidecar"
        )
        namespace.eventually(
            lambda pod=pod, before=before: _committed(namespace, pod) > before,
            what=f"a commit after {before}, which {pod} knows",
        )


def _committed(namespace: Kubectl, pod: str) -> int:
    """The newest committed step, as this pod's sidecar knows it; -1 for none."""
    words = ("keepstep", "steps", "--dir", "/keepstep/volumes/scratch", "--json")
    steps = json.loads(namespace("exec", pod, "-c", runs.SIDECAR, "--", *words))["steps"]
    return max((step["step"] for step in steps if step["committed"]), default=-1)


def _converges_although_killed(cluster: Cluster, namespace: Kubectl) -> int:
    """Kill the reconciler three times about when it writes; the step committed afterwards."""
    committed = runs.committed_beyond(namespace, 5)
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
    return runs.committed_beyond(namespace, committed)


def _kill_reconciler(cluster: Cluster) -> None:
    pod = cluster.reconciler()
    (container,) = [container["name"] for container in pod["spec"]["containers"]]
    cluster.kill_container(pod, container)


def test_a_killed_and_then_hung_api_server_does_not_stop_training_or_commits(
    cluster: Cluster, training: Kubectl, turn_alone: None
) -> None:
    namespace = training
    committed = runs.committed_beyond(namespace, 5)
    before = runs.training_beyond(namespace, 0).last
    _signal(cluster, "-KILL")  # etcd, too
    namespace.eventually(lambda: namespace.list("pods"), what="it answers again")
    committed = runs.committed_beyond(namespace, committed)
    assert runs.training_beyond(namespace, before + 20).first == 0, "the trainers never ended"

    before = runs.training_beyond(namespace, 0).last
    _signal(cluster, "-STOP")
    try:
        assert not _answers(cluster), "the API server stands still"
        time.sleep(20)
    finally:
        _signal(cluster, "-CONT")
    namespace.eventually(lambda: namespace.list("pods"), what="it answers again")
    assert runs.committed_beyond(namespace, committed) > committed
    assert runs.training_beyond(namespace, before + 60).first == 0, "the trainers never ended"


def _signal(cluster: Cluster, signal: str) -> None:
    """To the API server and etcd."""
    (control_plane,) = [node for node in cluster.nodes() if "control-plane" in node]
    pids = cluster.on_node(control_plane, "pgrep", "-x", "kube-apiserver|etcd").split()
    cluster.on_node(control_plane, "kill", signal, *pids)


def _answers(cluster: Cluster) -> bool:
    done = cluster.kubectl.attempt("get", "--raw", "/readyz", "--request-timeout=3s", timeout_s=30)
    return done.returncode == 0
