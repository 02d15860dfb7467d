"""Faults of what lies beyond the pod: a way back, buddies that fail, strangers, a full drive."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path

import pytest

from tests.e2e import jobs, lineage, runs, stores, tiers
from tests.e2e.cluster import HOST_PATH, Cluster
from tests.e2e.kubectl import Kubectl

MASTER, WORKER = "gpt-master-0", "gpt-worker-0"


@pytest.fixture
def run() -> str:
    """Another each time: the nodes of a cluster that is kept still have the steps of the last."""
    return f"run-{time.time_ns() // 1_000_000}"


def _directory(kubectl: Kubectl, run: str, node_rank: int, *, path: str = HOST_PATH) -> str:
    return f"{path}/{kubectl.namespace}/{run}/{node_rank}/{run}"


# --- going back ----------------------------------------------------------------------------------


def test_steps_that_a_rollback_abandoned_are_never_restored_in_the_new_epoch(
    cluster: Cluster, namespace: Kubectl, reference: dict[int, str], run: str, tmp_path: Path
) -> None:
    first, two = cluster.workers()
    stores.start(namespace)
    namespace.apply(tiers.policy(), tiers.job(first, two, run=run))
    target = tiers.beyond(namespace, "archive", 10)
    runs.training_beyond(namespace, target + 25)
    tiers.beyond(namespace, "archive", target + 10)
    left = runs.status(namespace)["epoch"]

    _go_back(namespace, run, target)
    runs.kill_trainer(cluster, namespace, WORKER)
    life = runs.restarted(namespace)
    assert life.first == target + 1
    runs.same_losses(life, reference)
    second = namespace.eventually(
        lambda: (now := runs.status(namespace)["epoch"]) != left and now, what="a new epoch"
    )
    assert runs.becomes(namespace, "RestoreFrom")["reason"] == "Restored"

    # beyond everything that the old line had, so that both have steps of the same numbers
    namespace.eventually(
        lambda: second in (runs.status(namespace)["watermarks"].get("archive") or ""),
        within_s=120,
        what="the new line is archived",
    )
    namespace("delete", "pods", "-l", "keepstep.dev/injected", "--wait=true", timeout_s=400)
    again = runs.restarted(namespace, within_s=180)
    assert again.first > target + 1
    runs.same_losses(again, reference)
    third = namespace.eventually(
        lambda: (now := runs.status(namespace)["epoch"]) not in (left, second) and now,
        what="a third epoch",
    )
    tiers.beyond(namespace, "archive", again.first)
    tiers.ended(namespace)

    found = lineage.checked(lineage.fetched(cluster, namespace, tmp_path), run)
    epochs = {str(epoch.id): epoch for epoch in found.epochs}
    assert str(epochs[second].parent) == f"{left}-{target:09d}"
    assert str(epochs[third].parent).startswith(f"{second}-"), "never a step that was left"
    assert max(found.steps).epoch == epochs[third].id


def _go_back(kubectl: Kubectl, run: str, step: int) -> None:
    body = json.dumps({"spec": {"restoreFrom": str(step)}})
    kubectl("patch", "ckrun", run, "--type=merge", "-p", body)
    kubectl.eventually(
        lambda: runs.condition(kubectl, "RestoreFrom")["reason"] == "Waiting",
        what="the operator waits for the restart",
    )


# --- buddies -------------------------------------------------------------------------------------


def test_a_hung_or_emptied_peer_delays_no_rank_and_receives_its_copies_again(
    cluster: Cluster, namespace: Kubectl, run: str, measured: dict[str, float]
) -> None:
    first, two = cluster.workers()
    stores.start(namespace)
    namespace.apply(tiers.policy(), tiers.job(first, two, run=run))
    tiers.beyond(namespace, "peer", 10)
    before = runs.training_beyond(namespace, 40)

    with tiers.standing_still(cluster, namespace, WORKER):
        stopped_at = runs.training_beyond(namespace, before.last).last
        message = namespace.eventually(
            lambda: _not_replicated(namespace), within_s=120, what="it is said"
        )
        assert WORKER in message or MASTER in message
        during = runs.training_beyond(namespace, stopped_at + 30)
    assert during.first == 0, "the trainers never ended"
    usual, slowed = _pace_s(before, 10, 40), _pace_s(during, stopped_at + 5, stopped_at + 30)
    measured["a step with a buddy"] = usual
    measured["a step while the buddy stands still"] = slowed
    # who waits for a buddy waits for seconds: the rest is left to what else the machine does
    assert slowed < max(3 * usual, 2.0)
    tiers.beyond(namespace, "peer", during.last)

    tiers.delete_copies(cluster, two, _directory(namespace, run, 1))
    runs.kill_sidecar(cluster, namespace, WORKER)
    at = runs.training_beyond(namespace, 0).last
    tiers.beyond(namespace, "peer", at)
    namespace.eventually(
        lambda: tiers.shards(cluster, two, _directory(namespace, run, 1), copies=True),
        what="copies lie there again",
    )
    assert runs.training_beyond(namespace, at).first == 0, "the trainers never ended"


def _step(name: str) -> int:
    """The number of a step's name, or of the directory that a shard lies in."""
    return int(name.split("/")[-2 if "/" in name else -1].rpartition("-")[2])


def _not_replicated(kubectl: Kubectl) -> str:
    """Why; '' while all is well. Either the copies do not get there, or a sidecar is silent."""
    for kind in ("Replicated", "Protected"):
        if (condition := runs.condition(kubectl, kind))["status"] != "True":
            return str(condition["message"])
    return ""


def _pace_s(life: jobs.Life, begin: int, end: int) -> float:
    """Median seconds of a step."""
    ends = [life.ended_at[step] for step in range(begin, end)]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def test_a_copy_whose_bytes_changed_is_refused_and_the_next_step_that_verifies_is_restored(
    cluster: Cluster,
    namespace: Kubectl,
    reference: dict[int, str],
    run: str,
    record_property: runs.Record,
) -> None:
    first, two = cluster.workers()
    stores.start(namespace)
    job = tiers.job(first, two, run=run)
    # copies come some steps behind what is kept here; the archive is away when the pods go
    namespace.apply(tiers.policy(kept=6, flushTimeout="15s"), job)
    archived = tiers.beyond(namespace, "archive", 20)
    tiers.beyond(namespace, "peer", archived)
    (store,) = namespace.list("pods", "app=s3")
    with tiers.standing_still(cluster, namespace, store["metadata"]["name"], "s3"):
        last = runs.training_beyond(namespace, 0).last
        tiers.beyond(namespace, "peer", last)  # so the archive lacks the newest copies
        tiers.ended(namespace)
    namespace("rollout", "status", "deployment/s3", "--timeout=240s", timeout_s=250)

    # the first node comes back without its drive, and what its buddy keeps has rotted
    cluster.on_node(first, "rm", "-rf", _directory(namespace, run, 0))
    kept = _directory(namespace, run, 1)
    copies, own = (
        {_step(path): path for path in tiers.shards(cluster, two, kept, copies=copies)}
        for copies in (True, False)
    )
    both = copies.keys() & own.keys()
    rotten = max(both)
    assert rotten > last
    # pods end at steps of their own: what only one rank has, a twin would restore, too
    lone = [path for found in (copies, own) for step, path in found.items() if step not in both]
    cluster.on_node(two, "rm", "-f", *lone)
    tiers.rot(cluster, two, copies[rotten])
    namespace.apply(job)
    life = runs.restarted(namespace, within_s=240)
    restored = life.first - 1
    assert archived - 1 <= restored < rotten
    for pod in (MASTER, WORKER):
        assert "goes on from what other ranks saved" not in namespace.logs(pod, "pytorch")
    runs.same_losses(life, reference)
    record_property("lost_steps", max(own) - restored)
    refused = [
        line for line in tiers.logged(namespace, MASTER) if line["event"] == "restore.copy_refused"
    ]
    assert {_step(str(line["step"])) for line in refused} == {rotten}, refused
    assert "is damaged" in refused[0]["error"]


# --- a full drive --------------------------------------------------------------------------------


def test_a_full_drive_is_reported_and_drops_peer_copies_before_commits_stop(
    cluster: Cluster, namespace: Kubectl, run: str
) -> None:
    first, two = cluster.workers()
    path = f"{HOST_PATH}/small-{run}"
    cluster.on_node(first, "mkdir", "-p", path)
    stores.start(namespace)
    with tiers.small_drive(cluster, two, path, mib=320):
        namespace.apply(tiers.policy(path), tiers.job(first, two, run=run))
        tiers.beyond(namespace, "peer", 10)
        tiers.fill(cluster, two, path)
        reason = namespace.eventually(lambda: _no_room(namespace), within_s=120, what="it is said")
        assert "node rank 1" in reason or WORKER in reason
        assert run in reason, "the directory"
        full_at = runs.training_beyond(namespace, 0)
        assert full_at.first == 0, "the trainers never ended"
        # what it keeps for others went first, which leaves room for its own
        assert runs.committed_beyond(namespace, full_at.last) > full_at.last
        tiers.beyond(namespace, "archive", full_at.last)
        tiers.free(cluster, two, path)
        tiers.beyond(namespace, "peer", runs.training_beyond(namespace, 0).last)
        runs.becomes(namespace, "Protected", within_s=90)
        tiers.ended(namespace)


def _no_room(kubectl: Kubectl) -> str:
    """What is said of a drive that is full; '' while nothing is. A condition says it only as long
    as it is so: what retention frees may be enough for a while."""
    reasons = [
        str(condition["message"])
        for kind in ("Committing", "Replicated")
        if (condition := runs.condition(kubectl, kind))["status"] == "False"
    ]
    reasons += [
        str(line["error"])
        for line in tiers.logged(kubectl, MASTER)
        if line["event"] == "tier.send_failed"
    ]
    return next((line for line in reasons if " free" in line or "no space" in line.lower()), "")
