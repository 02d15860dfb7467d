"""Every pod of a run has a place of its own in it, or is told that it cannot have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.operator.injection.pods import bare_pod, owner, policy_body
from tests.operator.promises.surface import (
    Body,
    Cluster,
    Webhook,
    injection,
    is_injected,
    pod,
    policy,
    promised,
    rank,
    reconciler,
    report,
    webhook,
)

WITH_AN_INDEX = {
    "StatefulSet": ("apps/v1", "apps.kubernetes.io/pod-index"),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        "leaderworkerset.sigs.k8s.io/worker-index",
    ),
    "MPIJob": ("kubeflow.org/v2beta1", "training.kubeflow.org/replica-index"),
    "Job": ("batch.volcano.sh/v1alpha1", "volcano.sh/task-index"),
}
WITHOUT = {
    "RayCluster": "ray.io/v1",
    "ReplicaSet": "apps/v1",
    "SomethingElse": "example.com/v1",
}


def _pod(kind: str, api_version: str, index: int, labels: dict[str, Any]) -> Body:
    body = bare_pod(f"train-{index}")
    body["metadata"]["labels"] |= labels
    body["metadata"]["annotations"] |= labels
    body["metadata"]["ownerReferences"] = [owner(kind, "train", api_version=api_version)]
    return body


def _reason(pod: Body) -> str:
    return str(injection(pod).get("reason", ""))


async def _two_pods(
    admission: Webhook, kind: str, api_version: str, label: str = ""
) -> tuple[Body, Body]:
    """The first two pods of a job, as they would be stored."""
    both = [_pod(kind, api_version, one, {label: str(one)} if label else {}) for one in (0, 1)]
    first, second = [(await admission.create(one))[0] for one in both]
    return first, second


async def test_pods_that_have_an_index_never_share_a_node_rank(tmp_path: Path) -> None:
    shared = {}
    async with webhook(tmp_path, policy_body()) as admission:
        for kind, (api_version, label) in WITH_AN_INDEX.items():
            both = await _two_pods(admission, kind, api_version, label)
            ranks = [one["metadata"]["labels"].get("keepstep.dev/node-rank") for one in both]
            refused = [_reason(one) == "UnknownJobKind" for one in both]
            if not any(refused) and len(set(ranks)) < 2:
                shared[kind] = ranks
    assert not shared, f"both pods have one node rank: {shared}"


async def test_several_pods_that_nothing_tells_apart_are_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    async with webhook(tmp_path, policy_body()) as admission:
        created = {kind: await _two_pods(admission, kind, WITHOUT[kind]) for kind in WITHOUT}
    taken = [kind for kind, both in created.items() if all(map(is_injected, both))]
    assert not taken, f"both pods of these are taken for node rank 0: {taken}"
    for both in created.values():
        refused = next(one for one in both if not is_injected(one))
        assert _reason(refused) == "UnknownJobKind"
        assert "keepstep.dev/node-rank" in injection(refused)["message"]


async def test_two_living_pods_of_one_node_rank_show_on_the_run(tmp_path: Path) -> None:
    first, second = pod(0), pod(0, node="node-1")
    second["metadata"] |= {"name": "twin", "uid": "twin"}
    cluster = Cluster(objects=dict([policy()]))
    tokens = [cluster.bind(first), cluster.bind(second)]
    async with reconciler(cluster, tmp_path) as operator:
        for number, token in enumerate(tokens):
            await operator.take(report(rank(number, 2, local=(1,))), token=token)
        await promised(
            lambda: cluster.conditions().get("DuplicateNodeRank", {}).get("status") == "True",
            lambda: f"conditions are {list(cluster.conditions())}",
        )
        message = cluster.conditions()["DuplicateNodeRank"]["message"]
        assert "twin" in message
