"""What docs/quickstart.md shows: a policy, one annotation, and a run that can be seen."""

from __future__ import annotations

import time

from tests.e2e import jobs, runs
from tests.e2e.kubectl import Kubectl


def test_a_job_with_two_replicas_is_checkpointed_shown_by_kubectl_and_completes(
    namespace: Kubectl,
) -> None:
    namespace.apply(jobs.policy())
    job = jobs.example("pytorchjob.yaml")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():  # it lasts for hours
        (container,) = replica["template"]["spec"]["containers"]
        container["args"] = jobs.trainer(steps=jobs.STEPS)["args"]
    namespace.apply(job)

    pods = namespace.eventually(
        lambda: len(found := namespace.list("pods")) == 2 and found, what="two pods"
    )
    for pod in pods:
        assert pod["metadata"]["labels"]["keepstep.dev/injected"] == "true"
        assert pod["spec"]["initContainers"][0]["name"] == "keepstep-sidecar"

    first = runs.committed_beyond(namespace, 0)
    assert runs.committed_beyond(namespace, first) > first, "the watermark advances"

    namespace.eventually(
        lambda: "PodRestart" in runs.status(namespace)["survives"], what="it outlives a pod"
    )
    assert runs.becomes(namespace, "Protected")["message"]
    header, line = namespace("get", "ckrun").splitlines()
    columns = ["NAME", "JOB", "STEP", "COMMITTED", "BEHIND", "SURVIVES", "PROTECTED", "PHASE"]
    assert header.split() == columns
    shown = dict(zip(columns, line.split(), strict=True))
    assert shown["JOB"] == "gpt"
    assert int(shown["STEP"]) > 0
    assert (shown["PROTECTED"], shown["PHASE"]) == ("True", "Running")
    assert "PodRestart" in shown["SURVIVES"], "the other pod has all that goes with an emptyDir"
    wide = namespace("get", "ckrun", "-o", "wide").splitlines()[0].split()
    assert {"TIERS", "NODES"} <= set(wide)
    _writes_are_bounded_by_time_not_by_steps(namespace)

    namespace.eventually(lambda: _succeeded(namespace), within_s=240, what="the job completes")
    namespace.eventually(
        lambda: all(pod["status"]["phase"] == "Succeeded" for pod in namespace.list("pods")),
        within_s=60,
        what="no pod hangs on its sidecar",
    )
    life = runs.training_beyond(namespace, 0)
    assert life.last == jobs.STEPS - 1
    namespace.eventually(
        lambda: runs.status(namespace)["phase"] == "Finished", what="the run is finished"
    )


def _writes_are_bounded_by_time_not_by_steps(namespace: Kubectl) -> None:
    runs.committed_beyond(namespace, 5)
    name = runs.the_run(namespace)["metadata"]["name"]
    began = time.monotonic()
    with namespace.watching("ckrun", name) as versions:
        first = runs.training_beyond(namespace, 0).last
        last = runs.training_beyond(namespace, first + 40).last
    seconds, wrote = time.monotonic() - began, len(versions) - 1  # the first is what was there
    assert last - first >= 40
    assert wrote <= seconds / 2 + 2, f"{wrote} writes in {seconds:.0f} s"


def _succeeded(kubectl: Kubectl) -> bool:
    job = kubectl.get("pytorchjob", "gpt")
    conditions = (job or {}).get("status", {}).get("conditions", [])
    return any(
        condition["type"] == "Succeeded" and condition["status"] == "True"
        for condition in conditions
    )
