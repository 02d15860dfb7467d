"""What a run's CheckpointRun says, and the ways a run dies."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from tests.e2e import jobs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object

SIDECAR = "keepstep-sidecar"

Record = Callable[[str, object], None]
"""pytest's `record_property`."""


def lost(killed: jobs.Life, life: jobs.Life) -> int:
    """Finished steps of the life that ended, beyond the step that the next one goes on from."""
    return max(0, killed.last - (life.first - 1))


def the_run(kubectl: Kubectl, job: str = "gpt") -> Object:
    """The one CheckpointRun of this job. Raises RuntimeError while there is none."""
    found = [body for body in kubectl.list("ckrun") if body.get("status", {}).get("jobName") == job]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} CheckpointRuns of job {job}")
    return found[0]


def status(kubectl: Kubectl, job: str = "gpt") -> Object:
    """Its status."""
    body: Object = the_run(kubectl, job)["status"]
    return body


def condition(kubectl: Kubectl, kind: str, job: str = "gpt") -> Object:
    """One condition of the run. Raises KeyError while there is none."""
    for condition in status(kubectl, job)["conditions"]:
        if condition["type"] == kind:
            body: Object = condition
            return body
    raise KeyError(kind)


def becomes(
    kubectl: Kubectl,
    kind: str,
    status: str = "True",
    *,
    job: str = "gpt",
    words: str = "",
    within_s: float = 120.0,
) -> Object:
    """Wait until a condition of the run has this status, and `words` in its message."""
    found: Object = {}

    def probe() -> bool:
        nonlocal found
        found = condition(kubectl, kind, job)
        return found["status"] == status and words in found["message"]

    def what() -> str:
        return f"{kind}={status} {words!r}; it is {found or 'not there'}"

    kubectl.eventually(probe, within_s=within_s, what=what)
    return found


def committed_beyond(kubectl: Kubectl, step: int, *, within_s: float = 150.0) -> int:
    """Wait until a step beyond `step` is committed; the step."""

    def probe() -> Any:
        found = status(kubectl).get("committed", {}).get("step", -1)
        return found > step and found

    found: int = kubectl.eventually(probe, within_s=within_s, what=f"a commit beyond step {step}")
    return found


def goodput(kubectl: Kubectl, *, beyond: int, within_s: float = 180.0) -> Object:
    """Wait until what is counted of the run goes beyond this step, and check that it adds up. It is
    written once a minute."""

    def probe() -> Any:
        found = status(kubectl).get("goodput", {})
        return found.get("step", -1) > beyond and found

    found: Object = kubectl.eventually(
        probe, within_s=within_s, what=f"goodput that counts steps beyond {beyond}"
    )
    badput = found.get("badputSeconds", {})
    wall = found["wallSeconds"]
    assert found["productiveSeconds"] + sum(badput.values()) == wall
    assert unix_s(found["until"]) - unix_s(found["since"]) == wall
    assert 0 < found["productiveSeconds"] < wall
    assert found["ratio"] == f"{found['productiveSeconds'] / wall:.3f}"
    return found


def training_beyond(
    kubectl: Kubectl,
    step: int,
    *,
    pod: str = "gpt-master-0",
    within_s: float = 180.0,
    container: str = "pytorch",
) -> jobs.Life:
    """Wait until rank 0 has finished a step beyond `step`; its present life."""

    def probe() -> Any:
        life = jobs.life(kubectl, pod, container=container)
        return life and life.last > step and life

    found: jobs.Life = kubectl.eventually(probe, within_s=within_s, what=f"a step beyond {step}")
    return found


def restarted(
    kubectl: Kubectl,
    *,
    pod: str = "gpt-master-0",
    within_s: float = 120.0,
    container: str = "pytorch",
) -> jobs.Life:
    """Wait until rank 0 trains again in a life that began behind step 0, with five steps done."""

    def probe() -> Any:
        life = jobs.life(kubectl, pod, container=container)
        return life and life.first > 0 and life.last >= life.first + 5 and life

    found: jobs.Life = kubectl.eventually(probe, within_s=within_s, what="a life behind step 0")
    return found


def ended(kubectl: Kubectl, before: jobs.Life, *, pod: str = "gpt-master-0") -> jobs.Life:
    """The life of rank 0 that `before` was read of, to its end. To be asked for before `restarted`:
    only one life is kept beside the present one, and a restore that fails is one, too."""

    def probe() -> Any:
        life = jobs.life(kubectl, pod, previous=True)
        return life and life.began_at == before.began_at and life

    found: jobs.Life = kubectl.eventually(probe, what="the end of the life that was killed")
    return found


def kill_sidecar(cluster: Cluster, kubectl: Kubectl, pod: str) -> None:
    """SIGKILL to a sidecar."""
    _kill(cluster, kubectl, pod, SIDECAR)


def kill_trainer(cluster: Cluster, kubectl: Kubectl, pod: str) -> None:
    """SIGKILL to a training container's first process. The others of its job end by themselves, or
    `end_survivor` ends them."""
    others = [
        cluster.process(injected, "pytorch")
        for injected in kubectl.list("pods", "keepstep.dev/injected")
        if injected["metadata"]["name"] != pod and injected["status"]["phase"] == "Running"
    ]
    _kill(cluster, kubectl, pod, "pytorch")
    for node, pid in others:
        end_survivor(cluster, node, pid, after_s=1.0)


def _kill(cluster: Cluster, kubectl: Kubectl, pod: str, container: str) -> None:
    body = kubectl.get("pod", pod)
    assert body is not None, f"no pod {pod}"
    cluster.kill_container(body, container)


def end_survivor(cluster: Cluster, node: str, pid: str, *, after_s: float) -> None:
    """SIGKILL to a trainer that is still there some time after it lost a peer.

    With torch 2.13 on two busy cores, about one in thirty is: gloo waits for the lost peer, in a
    collective or at Python's end, for as long as its timeout (half an hour). In a collective it
    does so if the connection broke within a message: `Pair::signalException` tells the operations
    that wait in the pair's queues, and the one that has begun has left them. Or it ends late, and
    the peer's next life has joined its store by then. Elsewhere a watchdog or a timeout ends them.
    """
    tenths = round(after_s * 10)
    there = f"kill -0 {pid} 2>/dev/null"
    script = f"i=0; while {there} && [ $i -lt {tenths} ]; do sleep 0.1; i=$((i + 1)); done"
    cluster.on_node(node, "sh", "-c", f"{script}; kill -9 {pid} 2>/dev/null || true")


def same_losses(life: jobs.Life, reference: dict[int, str]) -> None:
    """Every loss of this life, bit by bit, is that of the run that nothing interrupted."""
    compared = {step: loss for step, loss in life.losses.items() if step in reference}
    assert compared, f"nothing to compare: steps {life.first} to {life.last}"
    assert compared == {step: reference[step] for step in compared}


def start_to_step_s(kubectl: Kubectl, life: jobs.Life, *, pod: str = "gpt-master-0") -> float:
    """Seconds from the training container's start (to the second) to the life's first step."""
    body = kubectl.get("pod", pod)
    assert body is not None
    (container,) = [
        status for status in body["status"]["containerStatuses"] if status["name"] == "pytorch"
    ]
    return life.ended_at[life.first] - unix_s(container["state"]["running"]["startedAt"])


def scheduled_to_start_s(kubectl: Kubectl, *, pod: str = "gpt-master-0") -> float:
    """Seconds from the pod's scheduling to the start of its training container; both to a second.
    All images are on the node."""
    body = kubectl.get("pod", pod)
    assert body is not None
    (container,) = [
        status for status in body["status"]["containerStatuses"] if status["name"] == "pytorch"
    ]
    (scheduled,) = [
        condition
        for condition in body["status"]["conditions"]
        if condition["type"] == "PodScheduled"
    ]
    started = container["state"]["running"]["startedAt"]
    return unix_s(started) - unix_s(scheduled["lastTransitionTime"])


def resident_mib(cluster: Cluster, node: str, pid: str) -> float:
    """Anonymous memory and files of a process, without shared memory: that is slots."""
    status = cluster.on_node(node, "cat", f"/proc/{pid}/status")
    kib = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
    return (int(kib["RssAnon"]) + int(kib["RssFile"])) / 1024


def unix_s(time: str) -> float:
    """Unix seconds of a time as Kubernetes writes it."""
    return datetime.datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
