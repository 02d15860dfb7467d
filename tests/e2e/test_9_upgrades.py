"""helm upgrade, rollback and uninstall under a job that trains; then everything is deleted."""

from __future__ import annotations

from tests.e2e import jobs, runs
from tests.e2e.cluster import NAMESPACE, RELEASE, Cluster
from tests.e2e.kubectl import Kubectl


def test_upgrade_rollback_and_uninstall_leave_the_job_training(
    cluster: Cluster, training: Kubectl, turn_alone: None
) -> None:
    namespace = training
    committed = runs.committed_beyond(namespace, 5)

    cluster.install("--set", "admission.replicas=3")
    committed = runs.committed_beyond(namespace, committed)
    cluster.helm("rollback", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "540s")
    committed = runs.committed_beyond(namespace, committed)

    cluster.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "360s")
    try:
        assert namespace.list("ckrun"), "objects stay"
        alone = runs.training_beyond(namespace, committed + 20)
        assert alone.first == 0
        # a job that comes now trains without us
        namespace.apply(jobs.pytorch_job("bare", workers=0))
        runs.training_beyond(namespace, 3, pod="bare-master-0")
        namespace("delete", "pytorchjob", "bare", "--wait=false")
        cluster.kubectl("create", "namespace", "goes-away")
        gone = cluster.kubectl.namespaced("goes-away")
        gone.apply(jobs.policy(), _run_without_job())
        cluster.kubectl("delete", "namespace", "goes-away", "--wait=true", timeout_s=200)
    finally:
        cluster.install()
    owner = jobs.owner(namespace)
    jobs.all_inject(namespace, owner)
    assert runs.committed_beyond(namespace, committed) > committed
    assert runs.training_beyond(namespace, alone.last).first == 0, "the trainers never ended"


def _run_without_job() -> dict[str, object]:
    return {
        "apiVersion": "keepstep.dev/v1alpha1",
        "kind": "CheckpointRun",
        "metadata": {"name": "left-behind"},
        "spec": {},
    }


def test_helm_test_passes(cluster: Cluster) -> None:
    said = cluster.helm("test", RELEASE, "-n", NAMESPACE, "--timeout", "360s")
    assert "Succeeded" in said
