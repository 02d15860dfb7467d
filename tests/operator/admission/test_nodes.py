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


def node(name: str, size: str = "", *taints: dict[str, Any], **labels: str) -> dict[str, Any]:
    allocatable = {"memory": "64Gi", **({"hugepages-2Mi": size} if size else {})}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": list(taints)} if taints else {},
        "status": {"allocatable": allocatable},
    }


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
