"""What a pod leaves on its node when it goes to another one: served while needed, cleaned at last.

Without peers and without an archive: the drives of the two nodes are all there is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keepstep_operator.api.model import RunKey
from keepstep_operator.reconcile.helpers import pod_spec
from keepstep_operator.reconcile.helpers.pod_spec import HelperDefaults
from keepstep_operator.reconcile.state.helper_plan import Helper
from tests.e2e import jobs, runs
from tests.e2e.cluster import HELPERS, HOST_PATH, NAMESPACE, SIDECAR, Cluster
from tests.e2e.kubectl import Kubectl, Object


@pytest.fixture
def spread(cluster: Cluster, namespace: Kubectl) -> tuple[str, str]:
    """The nodes of the master and of the worker of a job of which some steps are committed."""
    stays, left = cluster.workers()
    namespace.apply(jobs.policy("node-local", host_path=True), _spread(stays, left))
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


def test_a_pod_that_moved_has_its_shards_from_the_node_it_left_and_both_are_cleaned_in_the_end(
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
        (said, *_) = namespace.eventually(
            lambda: namespace.events("LeftShardsServed"), what="an event that says what is served"
        )
        helpers = cluster.kubectl.namespaced(HELPERS)
        helpers.eventually(
            lambda: all(pod["spec"].get("nodeName") for pod in _helpers(helpers, namespace)),
            what="the helper pod has its node",
        )
    life = runs.restarted(namespace, within_s=240)
    record_property("seconds", round(time.monotonic() - moved_at, 1))
    body = namespace.get("pod", "gpt-worker-0")
    assert body is not None
    assert body["spec"]["nodeName"] == stays
    assert life.first - 1 >= committed
    runs.same_losses(life, reference)
    record_property("lost_steps", runs.lost(killed, life))
    assert left in said["message"]

    runs.committed_beyond(namespace, life.first)
    _no_helpers(cluster, namespace)

    namespace("delete", "pytorchjob", "gpt", "--wait=true", timeout_s=400)
    namespace.eventually(lambda: not namespace.list("pods"), within_s=150, what="the pods are gone")
    assert set(_directories(cluster, namespace.namespace, run)) == {stays, left}
    namespace("delete", "ckrun", run)
    namespace.eventually(
        lambda: _directories(cluster, namespace.namespace, run) == {},
        within_s=120,
        what="nothing of the run is on any node",
    )
    helpers.eventually(lambda: not _noted(helpers, run), what="nothing more is noted of the run")
    _no_helpers(cluster, namespace)


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


def _noted(system: Kubectl, run: str) -> list[Object]:
    return [
        one
        for one in system.list("configmaps", "keepstep.dev/run-directories")
        if json.loads(one["data"]["run"])["run"] == run
    ]


def _helpers(system: Kubectl, namespace: Kubectl) -> list[Object]:
    """Helper pods for the runs of a namespace."""
    return [
        pod
        for pod in system.list("pods", "keepstep.dev/helper")
        if json.loads(pod["metadata"]["annotations"]["keepstep.dev/about"])["namespace"]
        == namespace.namespace
    ]


def _no_helpers(cluster: Cluster, namespace: Kubectl) -> None:
    system = cluster.kubectl.namespaced(HELPERS)
    system.eventually(lambda: not _helpers(system, namespace), what="no helper pod is left")


def test_reconcile_may_make_no_pod_but_helper_pods_and_none_beside_the_keys(
    cluster: Cluster,
) -> None:
    good = _helper_pod()
    assert _refused(cluster, HELPERS, good) == ""
    volumes, (container,) = good["spec"]["volumes"], good["spec"]["containers"]

    def at(path: str) -> dict[str, str]:
        return {"path": path, "type": "Directory"}

    bad: list[tuple[str, dict[str, object]]] = [
        ("hostPaths", {"volumes": [*volumes, {"name": "v", "hostPath": at("/etc")}]}),
        ("hostPaths", {"volumes": [*volumes, {"name": "v", "hostPath": at(f"{HOST_PATH}x")}]}),
        ("hostPaths", {"volumes": [*volumes, {"name": "v", "secret": {"secretName": "s"}}]}),
        ("service account", {"serviceAccountName": "default"}),
        ("namespace of its node", {"hostPID": True}),
        ("sidecar image", {"initContainers": [{**container, "name": "first"}]}),
    ]
    for said, spec in bad:
        assert said in _refused(cluster, HELPERS, {**good, "spec": {**good["spec"], **spec}})
    security = container["securityContext"]
    worse: list[tuple[str, dict[str, object]]] = [
        ("sidecar image", {"image": "busybox"}),
        ("sidecar image", {"command": ["sh", "relay"]}),
        ("privileged", {"securityContext": {**security, "privileged": True}}),
        ("not root", {"securityContext": {**security, "runAsUser": 0}}),
        ("no Secret", {"envFrom": [{"secretRef": {"name": "s"}}]}),
    ]
    for said, changed in worse:
        spec = {**good["spec"], "containers": [{**container, **changed}]}
        assert said in _refused(cluster, HELPERS, {**good, "spec": spec})
    unlabelled = {**good, "metadata": {"name": "helper"}}
    assert "keepstep.dev/helper" in _refused(cluster, HELPERS, unlabelled)
    assert "forbidden" in _refused(cluster, NAMESPACE, good)


def _helper_pod() -> Object:
    """As reconcile makes it."""
    defaults = HelperDefaults(
        image=SIDECAR,
        namespace=HELPERS,
        account="keepstep-helpers",
        reports_url="https://reports",
        reports_ca=lambda: "",
    )
    helper = Helper(run=RunKey("team", "gpt"), node="n", paths=(HOST_PATH,), node_ranks=(0,))
    return pod_spec.serving(helper, defaults)


def _refused(cluster: Cluster, namespace: str, pod: Object) -> str:
    """Why reconcile may not make this pod, '' when it may."""
    body = {**pod, "metadata": {**pod["metadata"], "namespace": namespace}}
    done = cluster.kubectl.attempt(
        "create", "--dry-run=server", "-f", "-",
        f"--as=system:serviceaccount:{NAMESPACE}:keepstep-reconcile", input=json.dumps(body),
    )  # fmt: skip
    return done.stderr if done.returncode else ""
