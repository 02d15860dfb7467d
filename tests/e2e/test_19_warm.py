"""A training container whose entry point starts its trainer again by itself, warm."""

from __future__ import annotations

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl

WARM = ["python3", "-m", "keepstep.warm", "--", "python3", "/train_gpt.py"]


def test_a_killed_trainer_is_restarted_inside_its_container_without_the_kubelet(
    cluster: Cluster,
    namespace: Kubectl,
    reference: dict[int, str],
    measured: dict[str, float],
) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job(command=WARM))
    killed = runs.training_beyond(namespace, 20)
    for pod in ("gpt-master-0", "gpt-worker-0"):
        namespace.eventually(
            lambda pod=pod: _waits_to_be_asked(cluster, namespace, pod),
            what=f"the fork server of {pod} has imported torch",
        )
    survivor = _child(cluster, namespace, "gpt-master-0", "/train_gpt.py")
    at = _kill_trainer(cluster, namespace, "gpt-worker-0")
    runs.end_survivor(cluster, *survivor, after_s=5.0)
    life = runs.restarted(namespace)
    measured["kill -9 to the next step, warm"] = life.ended_at[life.first] - at
    assert life.tier == "memory"
    runs.same_losses(killed, reference)
    runs.same_losses(life, reference)
    for pod in ("gpt-master-0", "gpt-worker-0"):
        body = namespace.get("pod", pod)
        assert body is not None
        assert body["status"]["containerStatuses"][0]["restartCount"] == 0
        log = namespace.logs(pod, "pytorch")
        assert "it starts again" in log
        assert "cold" not in log


_RECVMSG = "47"


def _waits_to_be_asked(cluster: Cluster, kubectl: Kubectl, pod: str) -> bool:
    node, server = _child(cluster, kubectl, pod, "keepstep.warm.server")
    return cluster.on_node(node, "cat", f"/proc/{server}/syscall").startswith(f"{_RECVMSG} ")


def _kill_trainer(cluster: Cluster, kubectl: Kubectl, pod: str) -> float:
    """SIGKILL to the trainer, not to the container's first process; when (unix seconds)."""
    node, trainer = _child(cluster, kubectl, pod, "/train_gpt.py")
    return float(cluster.on_node(node, "sh", "-c", f"date +%s.%N; kill -9 {trainer}"))


def _child(cluster: Cluster, kubectl: Kubectl, pod: str, word: str) -> tuple[str, str]:
    """The node of a pod, and there the one child of its container's first process that has `word`
    in its command line. Raises RuntimeError while there is none."""
    body = kubectl.get("pod", pod)
    assert body is not None
    node, first = cluster.process(body, "pytorch")
    found = cluster.on_node(
        node,
        "sh",
        "-c",
        f"cd /proc; for p in $(cat {first}/task/*/children); do"
        f" if grep -qz '^{word}$' $p/cmdline; then echo $p; fi; done",
    )
    if len(children := found.split()) != 1:
        raise RuntimeError(f"children of {pod} with {word}: {children}")
    return node, children[0]
