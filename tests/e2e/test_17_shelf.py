"""etcd is lost: what the archive holds is listed again, from what sidecars find there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e import jobs, runs, stores, tiers
from tests.e2e.cluster import NAMESPACE, RECONCILE, Cluster
from tests.e2e.kubectl import Kubectl, Object


@pytest.fixture
def shelf(namespace: Kubectl) -> tuple[Object, Object]:
    """The policy and the job, which is gone, of which two steps are in the archive, the last one
    pinned."""
    stores.start(namespace)
    policy = jobs.policy(archive=stores.archive(), retention={"archive": {"last": 1000}})
    job = jobs.pytorch_job(run=f"shelf-{int(time.time())}")
    namespace.apply(policy, job)
    namespace.eventually(
        lambda: len(tiers.archived(namespace)) >= 2, within_s=150, what="two steps in the archive"
    )
    _pin(namespace, tiers.archived(namespace)[-1]["spec"]["step"])
    tiers.ended(namespace)
    return policy, job


@pytest.fixture
def scale_reconciler(cluster: Cluster, turn_alone: None) -> Iterator[Callable[[int], None]]:
    """Stops and starts the operator's reconciler; it runs again when the test is over."""
    system = cluster.kubectl.namespaced(NAMESPACE)

    def scale(replicas: int) -> None:
        system("scale", "deployment/keepstep-reconcile", f"--replicas={replicas}")
        system.eventually(
            lambda: len(system.list("pods", RECONCILE)) == replicas,
            what=f"{replicas} reconcilers",
        )

    yield scale
    scale(1)


def test_archived_checkpoints_are_listed_again_after_etcd_was_lost(
    cluster: Cluster,
    namespace: Kubectl,
    shelf: tuple[Object, Object],
    scale_reconciler: Callable[[int], None],
) -> None:
    policy, job = shelf
    (pinned,) = runs.the_run(namespace)["spec"]["pins"]
    before = tiers.archived(namespace)
    assert all(body["spec"]["ranks"] == 2 for body in before)
    in_store = _bytes_in_store(cluster, namespace, pinned)
    assert {body["spec"]["bytes"] for body in before} == {in_store}

    scale_reconciler(0)  # as etcd goes with all that was written there, and nobody writes it again
    for kind in ("checkpoints", "checkpointruns", "checkpointpolicies"):
        namespace("delete", kind, "--all", "--wait=true")
    scale_reconciler(1)
    assert not namespace.list("checkpoints")
    namespace.apply(policy, job)

    def listed_again() -> bool:
        now = {body["metadata"]["name"]: body for body in tiers.archived(namespace)}
        return all(_same(body, now.get(body["metadata"]["name"])) for body in before)

    namespace.eventually(listed_again, within_s=240, what="all that was archived is listed again")
    life = runs.restarted(namespace, within_s=240)
    assert life.tier == "archive"
    # a pin is a person's word: it was in etcd only, and the step is as any other now
    assert not runs.the_run(namespace)["spec"].get("pins")
    _pin(namespace, pinned)
    assert runs.the_run(namespace)["spec"]["pins"] == [pinned]


def _same(before: Object, now: Object | None) -> bool:
    return now is not None and now["spec"] == before["spec"]


def _pin(kubectl: Kubectl, step: str) -> None:
    name = runs.the_run(kubectl)["metadata"]["name"]
    body = json.dumps({"spec": {"pins": [step]}})
    kubectl("patch", "checkpointrun", name, "--type=merge", "-p", body)


def _bytes_in_store(cluster: Cluster, kubectl: Kubectl, step: str) -> int:
    """All shards of the step, as the files of the store's pod say."""
    (pod,) = kubectl.list("pods", "app=s3")
    data = f"/var/lib/kubelet/pods/{pod['metadata']['uid']}/volumes/kubernetes.io~empty-dir/data"
    script = f"cat $(find {data} -path '*/{step}/*.safetensors') | wc -c"
    return int(cluster.on_node(pod["spec"]["nodeName"], "sh", "-c", script))
