"""A pod of several is deleted with all that it kept: what comes next, and what people are told."""

from __future__ import annotations

import time

import pytest

from tests.e2e import jobs, runs, tiers
from tests.e2e.cluster import HOST_PATH, Cluster
from tests.e2e.kubectl import PATIENCE, Kubectl, Object


@pytest.fixture
def path() -> str:
    """A directory of a node, another each time."""
    return f"{HOST_PATH}/drive-{time.time_ns() // 1_000_000}"


def test_a_deleted_ddp_replica_resumes_from_the_remaining_pod(
    namespace: Kubectl, record_property: runs.Record
) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job())
    runs.committed_beyond(namespace, 10)
    before = runs.training_beyond(namespace, 10)
    namespace.eventually(
        lambda: "PodRestart" in runs.status(namespace)["survives"], what="it outlives a pod"
    )
    assert "and the run then" not in runs.condition(namespace, "Protected")["message"]
    began = _delete(namespace, "gpt-worker-0")
    killed = runs.ended(namespace, before)
    life = runs.restarted(namespace, within_s=120)
    record_property("lost_steps", runs.lost(killed, life))
    assert life.ended_at[life.first] - began < 60 * PATIENCE
    assert life.first > 10
    assert not namespace.events("LastStepLost"), "the other pod has it"
    assert not namespace.events("RestoreRefused")
    restored = namespace.eventually(lambda: namespace.events("Restored"), what="an Event")
    assert f"step {life.first - 1} " in restored[-1]["message"]


def test_a_run_starts_at_step_0_when_shards_were_lost_with_their_pod(namespace: Kubectl) -> None:
    namespace.apply(jobs.policy(), *jobs.sharded_job())
    committed = runs.committed_beyond(namespace, 10)
    assert runs.status(namespace)["survives"] == ["ContainerRestart"]
    runs.becomes(namespace, "Protected", words="the run then begins at step 0")
    began = _delete(namespace, "gpt-worker-0")
    lost = namespace.eventually(lambda: namespace.events("LastStepLost"), what="an Event")
    assert "the run begins again at step 0" in lost[-1]["message"]
    life = _begun_again(namespace, began)
    assert life.ended_at[0] - began < 60 * PATIENCE
    fresh = namespace.eventually(lambda: namespace.events("FreshStart"), what="an Event")
    (steps_lost,) = {
        int(event["message"].partition(" steps lost")[0].split("(")[-1]) for event in fresh
    }
    assert steps_lost >= committed
    assert not namespace.events("RestoreRefused")
    runs.committed_beyond(namespace, 5)
    runs.becomes(namespace, "Protected")


def test_a_run_with_on_loss_wait_waits_for_a_decision_after_shards_were_lost(
    namespace: Kubectl,
) -> None:
    namespace.apply(jobs.policy(onLoss="Wait"), *jobs.sharded_job())
    runs.committed_beyond(namespace, 10)
    runs.becomes(namespace, "Protected", words="waits for a person")
    _waits_and_begins_again(namespace, _delete(namespace, "gpt-worker-0"))


def test_a_run_with_a_lost_host_path_waits_until_one_command_restarts_it_at_step_0(
    cluster: Cluster, namespace: Kubectl
) -> None:
    here, there = cluster.workers()[:2]
    policy = jobs.policy("node-local", host_path=True)
    namespace.apply(policy, *jobs.sharded_job(policy="node-local", node=here))
    runs.committed_beyond(namespace, 10)
    name = runs.the_run(namespace)["metadata"]["name"]
    below = f"/var/lib/keepstep/{_name(namespace)}/{name}"
    for node in (here, there):  # the drive was replaced by an empty one
        cluster.on_node(node, "sh", "-c", f"mv {below}/1 {below}/gone-1 2>/dev/null || true")
    _waits_and_begins_again(namespace, _delete(namespace, "gpt-worker-0"))


def test_a_run_starts_at_step_0_when_its_drive_was_replaced(
    cluster: Cluster, namespace: Kubectl, path: str
) -> None:
    node = cluster.workers()[0]
    with tiers.small_drive(cluster, node, path, mib=320):
        committed = _committed_on(namespace, node, path)
        with tiers.small_drive(cluster, node, path, mib=320, number=1):
            began = _delete(namespace, "gpt-worker-0")  # the other pod has the former drive
            events = namespace.eventually(lambda: namespace.events("OtherDrive"), what="an Event")
            assert "lies on another file system than its steps did" in events[-1]["message"]
            life = _begun_again(namespace, began)
            assert life.ended_at[0] - began < 90 * PATIENCE
            fresh = namespace.eventually(lambda: namespace.events("FreshStart"), what="an Event")
            assert "lies on another file system" in fresh[-1]["message"]
            lost = fresh[-1]["message"].partition(" steps lost")[0].split("(")[-1]
            assert int(lost) >= committed
            runs.committed_beyond(namespace, 5)
            runs.becomes(namespace, "Protected")


def test_a_run_waits_for_an_unmounted_drive_and_resumes_once_it_is_mounted(
    cluster: Cluster, namespace: Kubectl, path: str
) -> None:
    node = cluster.workers()[0]
    with tiers.small_drive(cluster, node, path, mib=320):
        _committed_on(namespace, node, path)
        cluster.on_node(node, "umount", "--lazy", path)
        try:
            _delete(namespace, "gpt-worker-0")
            runs.becomes(namespace, "RestoreRefused", within_s=120)
            assert not namespace.events("OtherDrive")
        finally:
            cluster.on_node(node, "mount", "-o", "loop", f"{path}-0.img", path)
        began = _delete(namespace, "gpt-worker-0")
        life = runs.restarted(namespace, within_s=180)
        assert life.began_at > began
        assert life.first > 10
        assert not namespace.events("FreshStart")


def test_killing_sidecar_and_trainer_loses_only_the_steps_finished_between_the_two_kills(
    cluster: Cluster, namespace: Kubectl, record_property: runs.Record
) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job())
    before = runs.training_beyond(namespace, 10)
    runs.kill_sidecar(cluster, namespace, "gpt-worker-0")
    runs.kill_trainer(cluster, namespace, "gpt-worker-0")
    killed = runs.ended(namespace, before)
    life = runs.restarted(namespace, within_s=180)
    record_property("lost_steps", runs.lost(killed, life))
    assert life.first > before.last - 1, "no step is kept while the sidecar is away"


def _committed_on(namespace: Kubectl, node: str, path: str) -> int:
    """The committed step of a sharded job on a drive that is mounted there on this node."""
    policy = jobs.policy("node-local", host_path=True)
    policy["spec"]["volumes"] = [{"name": "nvme0", "hostPath": {"path": path}}]
    namespace.apply(policy, *jobs.sharded_job(policy="node-local", node=node))
    committed = runs.committed_beyond(namespace, 10)

    def known() -> bool:
        return len(runs.status(namespace).get("drives", ())) == 2

    namespace.eventually(known, what="the drives of both pods are on record")
    return committed


def _waits_and_begins_again(namespace: Kubectl, began: float) -> None:
    refused = runs.becomes(namespace, "RestoreRefused", within_s=120)
    assert "together they do not hold a whole one" in refused["message"]
    protected = runs.condition(namespace, "Protected")
    assert (protected["status"], protected["reason"]) == ("False", "RestoreRefused")
    namespace.eventually(lambda: namespace.events("RestoreRefused"), what="an Event")
    command = refused["message"].partition("`kubectl ")[2].partition("`")[0]
    assert runs.condition(namespace, "Committing")["status"] != "True"
    namespace(*command.split())
    life = _begun_again(namespace, began, within_s=150)
    assert life.first == 0
    committed = runs.committed_beyond(namespace, 5)
    runs.becomes(namespace, "Protected")
    assert all(
        condition["type"] != "RestoreRefused" for condition in runs.status(namespace)["conditions"]
    )
    # the request was for one start: from now on the run goes on from its own steps
    metadata = runs.the_run(namespace)["metadata"]
    assert metadata["annotations"]["keepstep.dev/fresh-start"] != "allow"
    assert committed > 5


def _begun_again(namespace: Kubectl, began: float, *, within_s: float = 120.0) -> jobs.Life:
    def probe() -> jobs.Life | None:
        life = jobs.life(namespace, "gpt-master-0")
        return (
            life if life and life.first == 0 and life.began_at > began and life.last > 3 else None
        )

    found: jobs.Life = namespace.eventually(probe, within_s=within_s, what="a life from step 0")
    return found


def _delete(namespace: Kubectl, pod: str) -> float:
    began = time.time()
    namespace("delete", "pod", pod, "--wait=false")
    return began


def _name(namespace: Kubectl) -> str:
    name: str = namespace.get("pod", "gpt-master-0")["metadata"]["namespace"]  # type: ignore[index]
    return name


def test_a_second_job_with_the_same_run_label_does_not_affect_the_commits_of_the_first(
    namespace: Kubectl,
) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job(run="shared"))
    runs.committed_beyond(namespace, 10)
    namespace.apply(jobs.indexed_job("again", pods=1, run="shared"))
    taken = namespace.eventually(lambda: namespace.events("RunTaken"), what="an Event")
    assert "Job again has the label keepstep.dev/run: shared" in taken[-1]["message"]
    namespace.eventually(
        lambda: any(
            "PyTorchJob gpt has" in warning for warning in runs.status(namespace)["warnings"]
        ),
        what="the warning",
    )
    runs.committed_beyond(namespace, runs.committed_beyond(namespace, 10) + 10)
    namespace("delete", "pytorchjob", "gpt", "--wait=true")
    namespace.eventually(
        lambda: not any("has that run" in warning for warning in _warnings(namespace, "again")),
        within_s=120,
        what="the second job has the run",
    )


def _warnings(namespace: Kubectl, job: str) -> list[str]:
    return runs.status(namespace, job).get("warnings") or []


def test_pods_that_swap_nodes_lose_no_step(cluster: Cluster, namespace: Kubectl) -> None:
    here, there = cluster.workers()[:2]
    policy = jobs.policy("node-local", host_path=True, peers={})
    namespace.apply(policy, *_apart(here, there))
    runs.committed_beyond(namespace, 10)
    namespace("delete", "pytorchjob", "gpt", "--wait=true")
    namespace.apply(*_apart(there, here))
    committed = runs.committed_beyond(namespace, 20)
    assert not namespace.events("FreshStart"), "it went on"
    runs.committed_beyond(namespace, committed + 10)


def _apart(master: str, worker: str) -> tuple[Object, Object]:
    """The sharded job, whose two pods ask for these nodes."""
    script, job = jobs.sharded_job(policy="node-local", run="places")
    for replica, node in zip(("Master", "Worker"), (master, worker), strict=True):
        spec = job["spec"]["pytorchReplicaSpecs"][replica]["template"]["spec"]
        job["spec"]["pytorchReplicaSpecs"][replica]["template"]["spec"] = spec | {
            "nodeSelector": {"kubernetes.io/hostname": node}
        }
    return script, job
