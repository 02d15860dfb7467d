"""Slots on huge pages last as on small ones."""

from __future__ import annotations

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object

_LARGE = ("--width", "512", "--layers", "2")
"""An image of 75 MiB: only those of 64 MiB and more are on huge pages."""
_MEMORY = {"limit": "320Mi", "hugePages": "2Mi"}


def _job(**of_template: Object) -> Object:
    args = ["--steps", "100000", "--log-file", "-", "--step-seconds", "0.5", *jobs.SMALL, *_LARGE]
    return jobs.pytorch_job(workers=0, args=args, **of_template)


def _sidecar(namespace: Kubectl) -> Object:
    pod = namespace.get("pod", "gpt-master-0")
    assert pod is not None
    found: Object = next(
        container
        for container in pod["spec"]["initContainers"]
        if container["name"] == "keepstep-sidecar"
    )
    return found


def test_a_trainer_and_its_sidecar_resume_from_huge_pages_after_kill_9(
    cluster: Cluster, namespace: Kubectl
) -> None:
    namespace.apply(jobs.policy(memory=_MEMORY), _job())
    runs.training_beyond(namespace, 5)
    limits = _sidecar(namespace)["resources"]["limits"]
    assert limits["hugepages-2Mi"] == "320Mi"
    namespace.eventually(
        lambda: runs.status(namespace)["pinned"] == "hugepages",
        what=lambda: f"pinned by huge pages, not {runs.status(namespace)['pinned']}",
    )
    # not the last finished one: 75 MiB are left out where no slot is free in a tenth of a second
    before = runs.committed_beyond(namespace, 5)
    pod = namespace.get("pod", "gpt-master-0")
    assert pod is not None
    cluster.kill_container(pod, "keepstep-sidecar")
    runs.kill_trainer(cluster, namespace, "gpt-master-0")
    life = runs.restarted(namespace)
    assert life.tier == "memory"
    assert life.first > before
    runs.committed_beyond(namespace, life.first)
    assert runs.status(namespace)["pinned"] == "hugepages"
