"""What LimitRanges and quotas leave, as admission learns it: followed, and asked where it is
tight."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep_operator.admission.rooms import pods_of
from keepstep_operator.api.pod import injected_of, parse_pod
from keepstep_operator.kube import LIMIT_RANGES, NAMESPACES, PODS, QUOTAS, Resource
from tests.harness import until
from tests.operator.admission.conftest import Running, Start
from tests.operator.apiserver import put_policy
from tests.operator.injection.pods import (
    EMPTY_DIR,
    HOST_PATH,
    NAMESPACE,
    bare_pod,
    indexed_job,
    policy_body,
)
from tests.operator.injection.test_room import ONE, SMALL, limit_range, quota

Body = dict[str, Any]
_JOBS = Resource(group="batch", version="v1", plural="jobs")


def _put(running: Running, resource: Resource, body: Body) -> None:
    running.server.put(resource, {**body, "metadata": {**body["metadata"], "namespace": NAMESPACE}})


def _pod(index: int) -> Body:
    pod = indexed_job(index=index)
    pod["spec"]["containers"][0]["resources"] = ONE
    return pod


async def _ready(running: Running) -> None:
    put_policy(running.server, policy_body(**SMALL))
    await until(lambda: running.rooms.synced)


def _reason(pod: Body) -> str:
    said = injected_of(parse_pod(pod))
    return said.reason if said else "nothing was said"


async def test_a_limit_range_holds_from_when_it_is_seen_until_it_is_gone(started: Start) -> None:
    async with started() as running:
        await _ready(running)

        async def limit() -> str | None:
            created, _ = await running.webhook.create(_pod(0))
            (sidecar,) = created["spec"]["initContainers"]
            found: str | None = sidecar["resources"]["limits"].get("cpu")
            return found

        assert await limit() is None
        _put(running, LIMIT_RANGES, limit_range({"type": "Container", "max": {"cpu": "1"}}))

        async def limited() -> bool:
            return await limit() == "1"

        async def free() -> bool:
            return await limit() is None

        await until(limited)
        running.server.delete(LIMIT_RANGES, "limits", namespace=NAMESPACE)
        await until(free)


async def test_rules_are_asked_for_until_all_are_known(started: Start) -> None:
    async with started(follow=False) as running:
        put_policy(running.server, policy_body(**SMALL))
        _put(running, QUOTAS, quota({"limits.cpu": "4"}))
        created, warnings = await running.webhook.create(bare_pod())
        assert _reason(created) == "NoRoom"
        assert "ResourceQuota quota" in warnings[0]


async def test_a_job_gets_sidecars_for_all_of_its_pods_or_for_none(started: Start) -> None:
    """Two CPUs hold four pods of half a CPU; with sidecars of half a CPU, two."""
    async with started() as running:
        _put(running, QUOTAS, quota({"limits.cpu": "2"}))
        await _ready(running)
        metadata = {"name": "bert", "namespace": NAMESPACE}
        for pods, injected in ((2, True), (4, False)):
            body = {"metadata": metadata, "spec": {"completions": pods, "template": {}}}
            running.server.put(_JOBS, {**body, "spec": {**body["spec"], "parallelism": pods}})
            running.rooms._sizes.clear()
            created, _ = await running.webhook.create(_pod(0))
            assert parse_pod(created).has_sidecar is injected


async def test_the_pods_that_are_there_are_not_counted_twice(started: Start) -> None:
    async with started() as running:
        spec = {"parallelism": 2, "completions": 2, "template": {}}
        running.server.put(
            _JOBS, {"metadata": {"name": "bert", "namespace": NAMESPACE}, "spec": spec}
        )
        _put(running, QUOTAS, quota({"limits.cpu": "2"}))
        await _ready(running)
        first, _ = await running.webhook.create(_pod(0))
        assert parse_pod(first).has_sidecar
        running.server.put(PODS, {**first, "metadata": {**first["metadata"], "name": "bert-0-x"}})
        _put(running, QUOTAS, quota({"limits.cpu": "2"}, {"limits.cpu": "1"}))
        second, warnings = await running.webhook.create(_pod(1))
        assert parse_pod(second).has_sidecar, warnings


async def test_without_the_jobs_size_pods_may_come_until_the_quota_is_full(started: Start) -> None:
    async with started() as running:
        _put(running, QUOTAS, quota({"limits.cpu": "2"}))
        await _ready(running)
        created, warnings = await running.webhook.create(_pod(0))
        assert _reason(created) == "NoRoom"
        assert "for each of 4 pods that are still to be created" in warnings[0]


@pytest.mark.parametrize(
    ("level", "volume", "own", "reason"),
    [
        ("baseline", HOST_PATH, False, "PodSecurity"),
        ("restricted", HOST_PATH, False, "PodSecurity"),
        ("privileged", HOST_PATH, False, ""),
        ("", HOST_PATH, False, ""),
        ("baseline", EMPTY_DIR, False, ""),
        ("baseline", HOST_PATH, True, ""),
    ],
)
@pytest.mark.parametrize("follow", [True, False])
async def test_a_hostpath_keeps_no_pod_from_a_namespace_that_admits_none(
    started: Start, level: str, volume: Body, own: bool, reason: str, follow: bool
) -> None:
    """A pod with a hostPath of its own is there by an exemption, which nobody can see."""
    async with started(follow=follow) as running:
        labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
        running.server.put(NAMESPACES, {"metadata": {"name": NAMESPACE, "labels": labels}})
        put_policy(running.server, policy_body(volume))
        await until(lambda: running.rooms.synced or not follow)
        pod = bare_pod()
        if own:
            pod["spec"]["volumes"].append({"name": "own", "hostPath": {"path": "/data"}})
        created, warnings = await running.webhook.create(pod)
        assert _reason(created) == reason
        assert ("Pod Security" in str(warnings)) is bool(reason)


async def test_quotas_that_cannot_be_read_let_the_pod_pass(started: Start) -> None:
    async with started(follow=False) as running:
        put_policy(running.server, policy_body())
        running.server.forbidden = "resourcequotas"
        created, warnings = await running.webhook.create(bare_pod())
        assert _reason(created) == "Unavailable"
        assert "no role says so" in warnings[0]


@pytest.mark.parametrize(
    ("spec", "pods"),
    [
        ({"template": {}}, 1),
        ({"template": {}, "parallelism": 8, "completions": 4}, 4),
        ({"template": {}, "parallelism": 8}, 8),
        ({"pytorchReplicaSpecs": {"Master": {}, "Worker": {"replicas": 7}}}, 8),
        ({"mpiReplicaSpecs": {"Launcher": {}, "Worker": {"replicas": 2}}, "slotsPerWorker": 8}, 3),
        (
            {
                "replicatedJobs": [
                    {"replicas": 2, "template": {"spec": {"parallelism": 3, "completions": 3}}},
                    {"template": {"spec": {}}},
                ]
            },
            7,
        ),
        ({"replicas": 5, "serviceName": "a", "template": {}}, 5),
        ({"replicas": 2, "leaderWorkerTemplate": {"size": 4}}, 8),
        ({"tasks": [{"replicas": 3}, {}]}, 4),
        ({}, None),
        ({"tasks": 5}, None),
        ({"replicatedJobs": [{"replicas": "many"}]}, None),
    ],
)
def test_the_size_of_a_job_is_read_from_its_spec(spec: Body, pods: int | None) -> None:
    assert pods_of(spec) == pods
