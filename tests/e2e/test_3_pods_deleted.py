"""Pods go, and come again on their node: what was flushed to the node is there."""

from __future__ import annotations

import time

import pytest

from tests.e2e import jobs, runs, tiers
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object

_HOST = {"policy": "node-local"}
_RUN = f"long-{int(time.time())}"
"""Another each time: the node of a cluster that is kept still has the steps of the last time."""
_COMPILED = """
import keepstep, os, pathlib
place = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
print(place.exists())
place.mkdir(exist_ok=True)
"""
"""Says whether anything lies where torch.compile will look, and leaves something there."""


def test_a_deleted_pod_flushes_and_its_successor_restores_that_step(
    cluster: Cluster,
    namespace: Kubectl,
    reference: dict[int, str],
    record_property: runs.Record,
) -> None:
    node = cluster.workers()[0]
    namespace.apply(
        # so rarely persisted that only the flush can have made the newest step durable
        jobs.policy("node-local", host_path=True, persist={"mode": "Fixed", "every": 1000}),
        jobs.pytorch_job(**_HOST, spec=_on(node)),
    )
    before = runs.training_beyond(namespace, 20)
    status = namespace.eventually(lambda: runs.status(namespace), what="a status")
    assert status.get("committed", {}).get("step", 0) == 0
    in_worker = ("exec", "gpt-worker-0", "-c", "pytorch", "--", "python", "-c", _COMPILED)
    assert namespace(*in_worker).strip() == "False"
    old = _uid(namespace, "gpt-worker-0")
    namespace("delete", "pod", "gpt-worker-0", "--wait=false")

    namespace.eventually(
        lambda: _uid(namespace, "gpt-worker-0") not in ("", old), what="the successor", within_s=150
    )
    killed = runs.ended(namespace, before)
    life = runs.restarted(namespace, within_s=180)
    assert life.first - 1 >= before.last - 2, "the newest staged step was flushed"
    record_property("lost_steps", runs.lost(killed, life))
    runs.same_losses(life, reference)
    assert namespace(*in_worker).strip() == "True", "the compile caches stayed on the node"
    restored = namespace.eventually(lambda: namespace.events("Restored"), what="an event")
    assert str(life.first - 1) in restored[-1]["message"]


@pytest.mark.long
def test_a_recreated_job_resumes_after_all_its_pods_were_deleted_at_once(
    cluster: Cluster, namespace: Kubectl, reference: dict[int, str]
) -> None:
    node = cluster.workers()[0]
    named = jobs.pytorch_job(**_HOST, spec=_on(node), run=_RUN)
    namespace.apply(jobs.policy("node-local", host_path=True), named)
    runs.committed_beyond(namespace, 20)
    before = runs.goodput(namespace, beyond=10)
    namespace("delete", "pods", "--all", "--wait=true", timeout_s=400)
    life = runs.restarted(namespace, within_s=180)
    runs.same_losses(life, reference)
    after = runs.goodput(namespace, beyond=life.first)
    assert after["since"] == before["since"], "the new pods go on with what was counted"
    assert [tally["id"] for tally in after["tallies"]] == [
        tally["id"] for tally in before["tallies"]
    ]
    assert after["productiveSeconds"] > before["productiveSeconds"]
    assert after["badputSeconds"]["infrastructureRecovery"] > 0, "no pod was there for a while"

    committed = runs.committed_beyond(namespace, life.first)
    tiers.ended(namespace)
    # without the label: another run, from step 0, and the old steps are kept
    namespace.apply(jobs.pytorch_job(**_HOST, spec=_on(node)))
    fresh = runs.training_beyond(namespace, 5)
    assert fresh.first == 0
    kept = namespace.get("ckrun", _RUN)
    assert kept is not None
    assert kept["status"]["committed"]["step"] >= committed
    tiers.ended(namespace)
    # with it: the run goes on
    namespace.apply(named)
    again = runs.restarted(namespace, within_s=180)
    assert again.first > committed - 2
    runs.same_losses(again, reference)


def _on(node: str) -> Object:
    return {"nodeSelector": {"kubernetes.io/hostname": node}}


def _uid(kubectl: Kubectl, pod: str) -> str:
    body = kubectl.get("pod", pod)
    return str(body["metadata"]["uid"]) if body else ""
