"""A second job begins from a step of the first one's archive, and leaves that as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import yaml

from tests.e2e import jobs, runs, stores, tiers
from tests.e2e.kubectl import Kubectl

_DATA = "/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/data/{bucket}"


def test_a_new_job_begins_from_a_step_of_anothers_archive(
    namespace: Kubectl, reference: dict[int, str]
) -> None:
    stores.start(namespace)
    first, second = f"first-{int(time.time())}", f"second-{int(time.time())}"
    namespace.apply(jobs.policy(archive=stores.archive()), jobs.pytorch_job(run=first))
    namespace.eventually(
        lambda: len(_steps(namespace, first)) >= 2, within_s=180, what="two steps are archived"
    )
    tiers.went(namespace)
    before = _listing(namespace, first)
    older = min(_steps(namespace, first))

    job = json.dumps(jobs.pytorch_job("fork", run=second))
    fork = yaml.safe_load(_keepstep(namespace, "fork", first, str(older), "-f", "-", input=job))
    for replica in fork["spec"]["pytorchReplicaSpecs"].values():
        annotations = replica["template"]["metadata"]["annotations"]
        assert annotations["keepstep.dev/restore-from"] == f"{first}/{older}"
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
    _what_the_plugin_says(namespace, first, second)


def _what_the_plugin_says(kubectl: Kubectl, first: str, second: str) -> None:
    """Of a run and its fork, as they are now."""
    (said,) = json.loads(_keepstep(kubectl, "tree", first, "-o", "json"))["forks"]
    assert said["run"] == second
    committed = next(
        one
        for one in json.loads(_keepstep(kubectl, "steps", second, "-o", "json"))
        if one["committed"]
    )
    _keepstep(kubectl, "pin", second, committed["id"])
    assert runs.the_run(kubectl, "fork")["spec"]["pins"] == [committed["id"]]
    _keepstep(kubectl, "unpin", second, committed["id"])
    assert runs.the_run(kubectl, "fork")["spec"]["pins"] == []
    assert "fork-master-0: {" in _keepstep(kubectl, "logs", second)
    checks = json.loads(_keepstep(kubectl, "doctor", "-o", "json"))
    assert {one["result"] for one in checks if one["check"] in ("kinds", "webhook")} == {"ok"}


def _keepstep(kubectl: Kubectl, *arguments: str, input: str | None = None) -> str:
    """`kubectl keepstep` in the namespace, of the checkout that is tested."""
    code = "from keepstep_operator.kubectl.main import cli; cli()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "-n", kubectl.namespace],
        env=os.environ | {"KUBECONFIG": str(kubectl.kubeconfig)},
        input=input,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0 or arguments[0] == "doctor", done.stderr
    return done.stdout


def _listing(kubectl: Kubectl, run: str) -> list[str]:
    """Name, size and time of everything that the store has of the run."""
    (pod,) = kubectl.list("pods", "app=s3")
    data = _DATA.format(uid=pod["metadata"]["uid"], bucket=stores.BUCKET)
    place = f"{data}/runs/{kubectl.namespace}/{run}"
    command = ["docker", "exec", pod["spec"]["nodeName"], "find", place, "-type", "f"]
    said = subprocess.run(
        [*command, "-printf", "%P %s %T@\\n"], check=False, capture_output=True, text=True
    )
    return sorted(said.stdout.splitlines())


def _steps(kubectl: Kubectl, run: str) -> set[int]:
    """Archived steps: those with a record."""
    names = (line.split()[0] for line in _listing(kubectl, run))
    return {int(one.split("/")[0].rpartition("-")[2]) for one in names if "step.json" in one}
