"""A second job begins from a step of the first one's archive, and leaves that as it was."""

from __future__ import annotations

import subprocess
import time

from tests.e2e import jobs, runs, stores, tiers
from tests.e2e.kubectl import Kubectl

_DATA = "/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/data/{bucket}"


def test_a_new_job_can_start_from_an_archived_step_of_another_job(
    namespace: Kubectl, reference: dict[int, str]
) -> None:
    stores.start(namespace)
    first, second = f"first-{int(time.time())}", f"second-{int(time.time())}"
    namespace.apply(jobs.policy(archive=stores.archive()), jobs.pytorch_job(run=first))
    namespace.eventually(
        lambda: len(_steps(namespace, first)) >= 2, within_s=180, what="two steps are archived"
    )
    tiers.ended(namespace)
    before = _listing(namespace, first)
    older = min(_steps(namespace, first))

    fork = jobs.pytorch_job("fork", run=second)
    for replica in fork["spec"]["pytorchReplicaSpecs"].values():
        annotations = replica["template"]["metadata"]["annotations"]
        annotations["keepstep.dev/restore-from"] = f"{first}/{older}"
    namespace.apply(fork)
    life = runs.restarted(namespace, pod="fork-master-0", within_s=240)
    assert (life.first, life.tier) == (older + 1, "archive")
    runs.same_losses(life, reference)
    namespace.eventually(
        lambda: runs.status(namespace, "fork").get("committed", {}).get("step", -1) > older,
        within_s=120,
        what="a commit of its own",
    )
    status = runs.status(namespace, "fork")
    assert status["origin"].startswith(f"{first}/")
    assert status["origin"].endswith(f"-{older:09d}")
    assert status["restarts"] == 0
    namespace.eventually(lambda: namespace.events("Forked"), what="an event")
    assert _listing(namespace, first) == before


def _listing(kubectl: Kubectl, run: str) -> list[str]:
    """Name, size and time of everything that the store has of the run."""
    (pod,) = kubectl.list("pods", "app=s3")
    data = _DATA.format(uid=pod["metadata"]["uid"], bucket=stores.BUCKET)
    place = f"{data}/runs/{kubectl.namespace}/{run}"
    command = ["docker", "exec", pod["spec"]["nodeName"], "find", place, "-type", "f"]
    done = subprocess.run(
        [*command, "-printf", "%P %s %T@\\n"], check=False, capture_output=True, text=True
    )
    return sorted(done.stdout.splitlines())


def _steps(kubectl: Kubectl, run: str) -> set[int]:
    """Archived steps: those with a record."""
    names = (line.split()[0] for line in _listing(kubectl, run))
    return {int(name.split("/")[0].rpartition("-")[2]) for name in names if "step.json" in name}
