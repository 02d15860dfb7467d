"""Pods that end, are replaced, or vanish while nobody looks do not hold up those that train."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.harness import until
from tests.operator.promises.surface import (
    HELPERS,
    Body,
    Cluster,
    Operator,
    pod,
    policy,
    promised,
    rank,
    reconciler,
    report,
)


def _helper_nodes(cluster: Cluster) -> set[str]:
    """Nodes for which a pod was made that serves what lies there."""
    made = [one for one in cluster.made("pods") if "relay" in str(one["spec"]["containers"])]
    affinity = [one["spec"]["affinity"]["nodeAffinity"] for one in made]
    required: list[Any] = [
        one["requiredDuringSchedulingIgnoredDuringExecution"] for one in affinity
    ]
    return {one["nodeSelectorTerms"][0]["matchFields"][0]["values"][0] for one in required}


async def _commit(operator: Operator, tokens: list[str]) -> None:
    """All of them hold step 1."""
    told = [report(rank(number, len(tokens), local=(1,))) for number in range(len(tokens))]
    pairs = zip(told, tokens, strict=True)
    await asyncio.gather(*(operator.take(body, token=token) for body, token in pairs))


async def _begin_anew(cluster: Cluster, operator: Operator, pods: list[Body]) -> None:
    """New pods on other nodes, which have nothing."""
    for number, one in enumerate(pods):
        token = cluster.bind(one)
        await operator.take(report(rank(number, len(pods))), token=token)


async def test_a_terminating_pod_beside_its_replacement_stops_no_restore(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    old, new = [[pod(one, life=life) for one in range(3)] for life in (1, 2)]
    for number, one in enumerate(new):
        one["spec"]["nodeName"] = f"other-{number}"
    tokens = [cluster.bind(one) for one in old]
    async with reconciler(cluster, tmp_path, *HELPERS) as operator:
        await _commit(operator, tokens)
        await until(lambda: cluster.run().get("status"), what="the run's object")
        for one in old[:2]:
            cluster.drop(one)
        old[2]["metadata"]["deletionTimestamp"] = "2026-11-21T07:03:00Z"  # its node is lost
        cluster.bind(old[2])
        await _begin_anew(cluster, operator, new)
        await promised(
            lambda: {"node-0", "node-1"} <= _helper_nodes(cluster),
            lambda: f"helper pods are made for {_helper_nodes(cluster) or 'no node'}",
        )


async def test_what_lies_on_the_sixty_sixth_node_is_not_forgotten(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    nodes = [f"node-{number:03d}" for number in range(66)]
    tokens = [cluster.bind(pod(number, node=node)) for number, node in enumerate(nodes)]
    async with reconciler(cluster, tmp_path, *HELPERS) as operator:
        await _commit(operator, tokens)
        await until(lambda: (cluster.run().get("status") or {}).get("committed"), what="a commit")
    holders = {one["node"] for one in cluster.run()["status"]["holders"]}
    assert set(nodes) <= holders, f"{set(nodes) - holders} are not named"


async def test_a_pod_that_was_gone_before_the_watch_showed_it_is_forgotten(tmp_path: Path) -> None:
    cluster, seen = Cluster(objects=dict([policy()])), pod(0)
    async with reconciler(cluster, tmp_path) as operator:
        await until(lambda: cluster.watches("keepstep.dev/injected"), what="the watch of pods")
        token = cluster.bind_unseen(seen)
        await operator.take(report(rank(0, 1)), token=token)
        await until(lambda: operator.knows(1), what="the pod")
        cluster.drop_unseen(seen)
        cluster.expire_watches()
        await promised(
            lambda: _knows_none(operator), "the pod is still counted after all were listed"
        )


async def _knows_none(operator: Operator) -> bool:
    return await operator.metric("keepstep_run_pods") == 0
