"""A container of a pod gets SIGKILL; the pod stays."""

from __future__ import annotations

import time

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object


def test_a_killed_sidecar_does_not_stop_training_and_a_killed_trainer_resumes_from_memory(
    cluster: Cluster,
    namespace: Kubectl,
    reference: dict[int, str],
    measured: dict[str, float],
    record_property: runs.Record,
) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job())
    before = runs.training_beyond(namespace, _sidecar_comes_back(cluster, namespace))
    assert before.first == 0, "the trainer never ended"
    assert _restarts(namespace, "gpt-master-0", "pytorch") == 0
    measured["pod to trainer, injected"] = runs.scheduled_to_start_s(namespace)
    measured["a finished step to its status"] = _seconds_to_status(namespace)
    runs.kill_trainer(cluster, namespace, "gpt-worker-0")

    killed = runs.ended(namespace, before)
    life = runs.restarted(namespace)
    assert killed.last >= before.last
    assert life.tier == "memory"
    record_property("lost_steps", runs.lost(killed, life))
    # one image may be unsealed when the kill comes, and the other rank may be a step behind
    assert killed.last - 2 <= life.first - 1 <= killed.last + 1, "no finished step but the newest"
    runs.same_losses(killed, reference)
    runs.same_losses(life, reference)

    on = namespace.eventually(
        lambda: len(on := _by_kind(namespace.events("Restored"))) == 2 and on, what="both events"
    )
    message = on["PyTorchJob"]["message"]
    assert str(life.first - 1) in message
    assert "memory" in message
    assert " s" in message
    for kind, name in (
        ("PyTorchJob", "gpt"),
        ("CheckpointRun", runs.the_run(namespace)["metadata"]["name"]),
    ):
        assert message[:40] in namespace("describe", kind, name), "kubectl describe shows it"
    namespace.eventually(
        lambda: runs.status(namespace).get("restarts", 0) >= 1, what="the restart is counted"
    )
    runs.committed_beyond(namespace, life.first)
    measured["trainer to first step, restarted in place"] = runs.start_to_step_s(namespace, life)
    measured["of which restore"] = life.restore_s


def _by_kind(events: list[Object]) -> dict[str, Object]:
    """By the kind of what they are on."""
    return {event["involvedObject"]["kind"]: event for event in events}


def _seconds_to_status(kubectl: Kubectl) -> float:
    """From the end of a step until `kubectl get ckrun` shows it, kubectl's own time included."""
    step = runs.training_beyond(kubectl, 0).last + 5
    kubectl.eventually(lambda: runs.status(kubectl)["step"] >= step, what="the step is shown")
    seen = time.time()
    shown = runs.status(kubectl)["step"]
    life = runs.training_beyond(kubectl, shown)
    return seen - life.ended_at[shown]


def _sidecar_comes_back(cluster: Cluster, namespace: Kubectl) -> int:
    """Kill a sidecar; a step that was committed after it came back."""
    committed = runs.committed_beyond(namespace, 5)
    runs.kill_sidecar(cluster, namespace, "gpt-master-0")
    namespace.eventually(
        lambda: _restarts(namespace, "gpt-master-0", "keepstep-sidecar") == 1,
        what="the sidecar is restarted",
    )
    at_kill = runs.training_beyond(namespace, 0).last
    log = namespace.eventually(
        lambda: "slot.adopted" in (text := _sidecar_log(namespace, "gpt-master-0")) and text,
        what="the slots are adopted",
    )
    assert "slot.file_discarded" not in log
    return runs.committed_beyond(namespace, max(committed, at_kill))


def _restarts(kubectl: Kubectl, pod: str, container: str) -> int:
    body = kubectl.get("pod", pod)
    assert body is not None
    status = body["status"]
    statuses = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    (count,) = [int(status["restartCount"]) for status in statuses if status["name"] == container]
    return count


def _sidecar_log(kubectl: Kubectl, pod: str) -> str:
    return kubectl.logs(pod, "keepstep-sidecar")
