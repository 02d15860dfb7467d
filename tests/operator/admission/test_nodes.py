"""`memory.hugePages: Auto`: a pod asks for huge pages only where it is sure to find them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keepstep_operator.admission.nodes import NodeCache
from keepstep_operator.api.policy import HugePages
from keepstep_operator.kube import NODES, Client
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.injection.pods import policy

_CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_GPU = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
_TOLERATES = {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}


_TWO_OF_EIGHT = [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]


def node(name: str, size: str = "", *taints: dict[str, Any], **labels: str) -> dict[str, Any]:
    allocatable = {"memory": "64Gi", "nvidia.com/gpu": "8"}
    allocatable |= {"hugepages-2Mi": size} if size else {}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": list(taints)} if taints else {},
        "status": {"allocatable": allocatable},
    }


_SECRET = {"name": "s", "secret": {"secretName": "s"}}
_KEY = {"name": "k", "secret": {"secretName": "k", "items": [{"key": "k", "mode": 0o600}]}}

_OWN = {"name": "h", "emptyDir": {"medium": "HugePages-1Gi"}}


def _asking(size: str) -> dict[str, Any]:
    return {"resources": {"limits": {"hugepages-2Mi": size}}}


def settled(cache: NodeCache, spec: dict[str, Any], *, words: str = "Auto") -> HugePages:
    return cache.settled(policy(memory={"limit": "2Gi", "hugePages": words}), spec).huge_pages


@pytest.mark.parametrize(
    ("nodes", "spec", "asks"),
    [
        ([node("a", "4Gi"), node("b", "2Gi")], {}, True),
        ([node("a", "4Gi"), node("b", "2046Mi")], {}, False),
        ([node("a", "4Gi"), node("b")], {}, False),
        ([node("a", "4Gi", pool="gpu"), node("b")], {"nodeSelector": {"pool": "gpu"}}, True),
        ([node("a", "4Gi", pool="gpu"), node("b")], {"nodeSelector": {"pool": "cpu"}}, False),
        ([node("a", "4Gi"), node("b", "", _CORDON)], {}, True),
        ([node("a", "4Gi"), node("b", "", {**_GPU, "effect": "PreferNoSchedule"})], {}, False),
        ([node("a", "4Gi", _GPU), node("b", "", _CORDON)], {}, False),
        ([node("a", "4Gi", _GPU)], {"tolerations": [_TOLERATES]}, True),
        ([node("a", "4Gi", _GPU)], {"tolerations": [{**_TOLERATES, "value": "no"}]}, False),
        ([node("a", "4Gi"), node("b", "", _GPU)], {"tolerations": [{"operator": "Exists"}]}, False),
        ([], {}, False),
        ([node("a", "8Gi")], {"containers": _TWO_OF_EIGHT}, True),
        ([node("a", "6Gi")], {"containers": _TWO_OF_EIGHT}, False),
        ([node("a", "4Gi")], {"containers": [_asking("2Gi")]}, True),
        ([node("a", "4Gi")], {"initContainers": [_asking("2050Mi")]}, False),
        ([node("a", "4Gi")], {"volumes": [_SECRET, {"name": "s", "emptyDir": {}}]}, True),
        ([node("a", "4Gi")], {"volumes": [_KEY]}, False),
        ([node("a", "4Gi")], {"volumes": [_KEY], "securityContext": {"fsGroup": 0}}, True),
        ([node("a", "4Gi")], {"volumes": [{"name": "d", "persistentVolumeClaim": {}}]}, False),
        ([node("a", "4Gi")], {"volumes": [{"name": "d", "iscsi": {}}]}, False),
        ([node("a", "4Gi")], {"volumes": [_OWN]}, False),
    ],
)  # fmt: skip
async def test_every_node_that_the_pod_may_run_on_has_to_have_enough(
    nodes: list[dict[str, Any]], spec: dict[str, Any], asks: bool
) -> None:
    objects = {NODES.path(one["metadata"]["name"]): one for one in nodes}
    async with ApiServer(objects=objects).running() as server, Client(server.access) as client:
        cache = NodeCache(client)
        assert settled(cache, spec) is HugePages.NONE, "before the nodes were seen"
        task = asyncio.create_task(cache.run())
        try:
            await until(lambda: cache.synced)
            assert settled(cache, spec) is (HugePages.ALWAYS if asks else HugePages.NONE)
            assert settled(cache, spec, words="2Mi") is HugePages.ALWAYS
            assert settled(cache, spec, words="None") is HugePages.NONE
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
