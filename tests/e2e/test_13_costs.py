"""What a pod pays for its sidecar. Printed, and bounded generously: this machine is shared."""

from __future__ import annotations

import statistics
import time

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object

_PODS = 3
_IDLE_S = 10.0


def test_waiting_for_the_sidecar_delays_a_pod_start_only_briefly(
    namespace: Kubectl, measured: dict[str, float]
) -> None:
    namespace.apply(jobs.policy())
    owner = jobs.owner(namespace)
    waits: dict[str, list[float]] = {"injected": [], "plain": []}
    for number in range(_PODS):  # in turns, so that a noisy minute meets both
        for kind, found in waits.items():
            pod = _dated(f"{kind}-{number}", owner, injected=kind == "injected")
            found.append(_start_s(namespace, pod))
    for kind, found in waits.items():
        measured[f"made to its trainer's first command, {kind} pod"] = statistics.median(found)
    assert statistics.median(waits["injected"]) < 60.0


def test_an_idle_sidecar_uses_almost_no_cpu_and_memory(
    cluster: Cluster, namespace: Kubectl, measured: dict[str, float]
) -> None:
    namespace.apply(jobs.policy())
    pod = jobs.owned_pod("idle", jobs.owner(namespace))
    _container(pod).update({"command": ["sleep", "600"], "args": []})
    namespace.apply(pod)
    namespace("wait", "pod/idle", "--for=condition=Ready", "--timeout=240s", timeout_s=250)
    body = namespace.get("pod", "idle")
    assert body is not None
    compiled = "import asyncio, os; assert os.path.exists(asyncio.__cached__)"
    namespace("exec", "idle", "-c", "keepstep-sidecar", "--", "python3", "-c", compiled)
    node, pid = cluster.process(body, "keepstep-sidecar")
    before = _ticks(cluster, node, pid)
    time.sleep(_IDLE_S)  # the span that is measured
    ticks = _ticks(cluster, node, pid) - before
    measured["idle sidecar: share of a core"] = ticks / 100 / _IDLE_S
    measured["idle sidecar: MiB resident"] = runs.resident_mib(cluster, node, pid)
    assert ticks / 100 / _IDLE_S < 0.05
    assert runs.resident_mib(cluster, node, pid) < 160


def _dated(name: str, owner: Object, *, injected: bool) -> Object:
    """A pod whose trainer says when it began, and ends."""
    pod = jobs.owned_pod(name, owner)
    _container(pod).update({"command": ["date", "+%s.%N"], "args": []})
    if not injected:
        del pod["metadata"]["annotations"]
    return pod


def _container(pod: Object) -> Object:
    container: Object = pod["spec"]["containers"][0]
    return container


def _start_s(kubectl: Kubectl, pod: Object) -> float:
    """Seconds from the request to make the pod to its trainer's first command: one clock, as the
    nodes are containers of this machine."""
    name = pod["metadata"]["name"]
    asked = time.time()
    kubectl.apply(pod)
    status = kubectl.eventually(
        lambda: kubectl.logs(name, "pytorch").strip(), within_s=90, what=f"{name} ran"
    )
    return float(status) - asked


def _ticks(cluster: Cluster, node: str, pid: str) -> int:
    """CPU time in ticks of 10 ms, user and system (proc_pid_stat(5), fields 14 and 15)."""
    stat = cluster.on_node(node, "cat", f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
