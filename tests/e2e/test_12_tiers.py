"""Beyond the node: an archive."""

from __future__ import annotations

import json
import time

from tests.e2e import jobs, runs, stores, tiers
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl


def test_a_recreated_job_resumes_from_the_archive(
    namespace: Kubectl, reference: dict[int, str], record_property: runs.Record
) -> None:
    stores.start(namespace)
    run = f"far-{int(time.time())}"
    job = jobs.pytorch_job(run=run)
    namespace.apply(jobs.policy(archive=stores.archive()), job)
    archived = tiers.beyond(namespace, "archive", 20)
    tiers.ended(namespace)
    last = runs.the_run(namespace)["status"]["step"]

    namespace.apply(job)  # an emptyDir went with each pod: only the archive is left
    life = runs.restarted(namespace, within_s=240)
    assert life.tier == "archive"
    assert life.first - 1 >= archived
    runs.same_losses(life, reference)
    record_property("lost_steps", max(0, last - life.first + 1))


def test_an_unreachable_archive_does_not_stop_training_and_is_caught_up_later(
    namespace: Kubectl,
) -> None:
    stores.start(namespace)
    namespace.apply(jobs.policy(archive=stores.archive()), jobs.pytorch_job())
    tiers.beyond(namespace, "archive", 5)
    namespace("scale", "deployment/s3", "--replicas=0")
    runs.becomes(namespace, "Archived", "False", within_s=150)
    at = runs.training_beyond(namespace, 0).last
    committed = runs.committed_beyond(namespace, at)
    namespace("scale", "deployment/s3", "--replicas=1")
    # its directory went with its pod: what is archived now was sent after it came back
    tiers.beyond(namespace, "archive", committed, within_s=240)


def test_a_job_with_another_number_of_replicas_resumes_from_the_archive(
    cluster: Cluster, namespace: Kubectl, record_property: runs.Record
) -> None:
    """From images of which the archive has in common what both replicas hold: they are large
    enough for that."""
    stores.start(namespace)
    args = ["--steps", "100000", "--log-file", "-", "--step-seconds", "0.5", *jobs.SMALL]
    job = jobs.pytorch_job(args=[*args, "--width", "320", "--layers", "3"])
    namespace.apply(jobs.policy(archive=stores.archive()), job)
    archived = tiers.beyond(namespace, "archive", 10)
    (store,) = namespace.list("pods", "app=s3")
    there = f"/var/lib/kubelet/pods/{store['metadata']['uid']}/volumes"
    # what the store makes and removes meanwhile `find` would fail for
    find = f"find {there} -name '*.twin-of-00000' 2>/dev/null; true"
    stored = cluster.on_node(store["spec"]["nodeName"], "sh", "-c", find)
    assert stored, "what both replicas hold is there once"
    _suspend(namespace, True)
    namespace.eventually(
        lambda: not namespace.list("pods", "keepstep.dev/injected"), within_s=150, what="no pods"
    )
    last = runs.status(namespace)["step"]
    wider = [{"op": "replace", "path": _REPLICAS, "value": 2}]
    namespace("patch", "pytorchjob", "gpt", "--type=json", "-p", json.dumps(wider))
    _suspend(namespace, False)

    life = runs.restarted(namespace, within_s=300)
    assert life.first - 1 >= archived
    namespace.eventually(lambda: runs.status(namespace)["world"] == 3, what="three ranks")
    assert runs.committed_beyond(namespace, life.first) > life.first
    record_property("lost_steps", max(0, last - life.first + 1))


_REPLICAS = "/spec/pytorchReplicaSpecs/Worker/replicas"


def _suspend(kubectl: Kubectl, suspend: bool) -> None:
    body = {"spec": {"runPolicy": {"suspend": suspend}}}
    kubectl("patch", "pytorchjob", "gpt", "--type=merge", "-p", json.dumps(body))
