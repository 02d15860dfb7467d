"""What a pod leaves on its node when it goes to another one: served while needed, cleaned at last.

Without peers and without an archive: the drives of the two nodes are all there is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e import jobs, runs, tiers
from tests.e2e.cluster import HOST_PATH, Cluster
from tests.e2e.kubectl import Kubectl, Object


@pytest.fixture
def spread(cluster: Cluster, namespace: Kubectl) -> tuple[str, str]:
    """The nodes of the master and of the worker of a job of which some steps are committed."""
    stays, left = cluster.workers()
    policy = jobs.policy("node-local", host_path=True, runTTL="1m")
    namespace.apply(policy, _spread(stays, left))
    runs.committed_beyond(namespace, 20)
    return stays, left


@contextmanager
def _cordoned(cluster: Cluster, node: str) -> Iterator[None]:
    """No more pods come to the node. Those of other tests that ask for it wait."""
    cluster.kubectl("cordon", node)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", node)


@pytest.mark.long
def test_a_rescheduled_pod_restores_from_its_old_node_and_both_nodes_are_cleaned_at_the_end(
    cluster: Cluster,
    namespace: Kubectl,
    reference: dict[int, str],
    spread: tuple[str, str],
    record_property: runs.Record,
) -> None:
    stays, left = spread
    committed = runs.committed_beyond(namespace, 20)
    run = str(runs.the_run(namespace)["metadata"]["name"])
    assert _directories(cluster, namespace.namespace, run) == {stays: ["0"], left: ["1"]}

    before = runs.training_beyond(namespace, 0)
    moved_at = time.monotonic()
    with _cordoned(cluster, left):
        namespace("delete", "pod", "gpt-worker-0", "--wait=false")
        killed = runs.ended(namespace, before)
        (event, *_) = namespace.eventually(
            lambda: namespace.events("LeftShardsServed"), what="an event that says what is served"
        )
    life = runs.restarted(namespace, within_s=240)
    record_property("seconds", round(time.monotonic() - moved_at, 1))
    body = namespace.get("pod", "gpt-worker-0")
    assert body is not None
    assert body["spec"]["nodeName"] == stays
    assert life.first - 1 >= committed
    runs.same_losses(life, reference)
    record_property("lost_steps", runs.lost(killed, life))
    assert left in event["message"]

    runs.committed_beyond(namespace, life.first)
    namespace.eventually(lambda: not _serving(namespace), what="the agent is not needed any more")

    tiers.ended(namespace)
    assert set(_directories(cluster, namespace.namespace, run)) == {stays, left}
    namespace.eventually(lambda: not namespace.list("ckrun"), within_s=180, what="its runTTL")
    assert set(_directories(cluster, namespace.namespace, run)) == {stays, left}
    namespace.eventually(
        lambda: _directories(cluster, namespace.namespace, run) == {},
        within_s=120,
        what="nothing of the run is on any node",
    )


def _serving(namespace: Kubectl) -> bool:
    conditions = runs.status(namespace)["conditions"]
    return any(condition["type"] == "LeftShardsServed" for condition in conditions)


def _spread(master: str, worker: str) -> Object:
    """Two replicas: the master on one node, the worker rather on the other."""
    job = jobs.pytorch_job(policy="node-local")
    for name, node in (("Master", master), ("Worker", worker)):
        there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        preferred = {"weight": 100, "preference": {"matchExpressions": [there]}}
        job["spec"]["pytorchReplicaSpecs"][name]["template"]["spec"]["affinity"] = {
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
        }
    return job


def _directories(cluster: Cluster, namespace: str | None, run: str) -> dict[str, list[str]]:
    """Node -> node ranks of which it has a directory of this run."""
    where = f"{HOST_PATH}/{namespace}/{run}"
    command = ("sh", "-c", f"ls -A {where} 2>/dev/null || true")
    found = {node: cluster.on_node(node, *command).split() for node in cluster.workers()}
    return {node: names for node, names in found.items() if names}
