"""A run goes on as it began while chart, policies and certificates change around it."""

from __future__ import annotations

import copy
from pathlib import Path

from tests.harness import until
from tests.operator.injection.pods import DEFAULTS, NAMESPACE, policy_body, pytorch_job
from tests.operator.promises.surface import (
    GROUP,
    Body,
    Cluster,
    pod,
    policy,
    rank,
    reconciler,
    report,
    sidecar_of,
    slots_of,
    webhook,
)


def _policy(*, slots: int, generation: int) -> Body:
    body = policy_body(memory={"limit": "2Gi", "slots": slots})
    body["metadata"] |= {"generation": generation, "uid": "p"}
    return body


async def _recorded(created: Body, directory: Path) -> Body:
    """The CheckpointRun that reconcile writes once this pod runs."""
    where = f"{GROUP}/namespaces/{NAMESPACE}/checkpointpolicies/default"
    cluster, running = Cluster({where: _policy(slots=4, generation=3)}), copy.deepcopy(created)
    running["metadata"] |= {"uid": "first", "creationTimestamp": "2026-11-21T07:00:00Z"}
    running["spec"]["nodeName"], running["status"] = "node-0", {"phase": "Running"}
    name = created["metadata"]["labels"]["keepstep.dev/run-key"]
    token = cluster.bind(running)
    async with reconciler(cluster, directory) as operator:
        await operator.take(report(rank(0, 2, local=(1,))), token=token)
        await until(
            lambda: (cluster.run(name, NAMESPACE).get("status") or {}).get("sidecarImage"),
            what="the run's status",
        )
    return cluster.run(name, NAMESPACE)


async def test_a_pod_that_joins_a_run_gets_the_image_and_policy_of_the_others(
    tmp_path: Path,
) -> None:
    before, now = _policy(slots=4, generation=3), _policy(slots=2, generation=4)
    async with webhook(tmp_path / "before", before, image="sidecar:1") as admission:
        first, _ = await admission.create(pytorch_job("master", rank=0))
        admission.put_run(await _recorded(first, tmp_path / "reconcile"))
        server = admission.server
        async with webhook(tmp_path / "now", now, server=server, image="sidecar:2") as admission:
            second, _ = await admission.create(pytorch_job("worker", rank=1))
    assert (sidecar_of(second)["image"], slots_of(second)) == ("sidecar:1", "4")
    assert (sidecar_of(first)["image"], slots_of(first)) == ("sidecar:1", "4")


async def test_a_reply_carries_the_authority_that_reports_are_to_trust(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    token = cluster.bind(pod(0))
    (tmp_path / "ca.crt").write_text(DEFAULTS.reports_ca)  # of the Secret, beside the certificate
    async with reconciler(cluster, tmp_path) as operator:
        reply = await operator.take(report(rank(0, 1)), token=token)
    assert reply["authorities"] == DEFAULTS.reports_ca
