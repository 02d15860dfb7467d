"""JobSet, a plain Indexed Job and a StatefulSet: a killed trainer goes on from memory, as in a
PyTorchJob."""

from __future__ import annotations

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object


def test_an_indexed_job_resumes_from_memory(
    cluster: Cluster, namespace: Kubectl, reference: dict[int, str]
) -> None:
    namespace.apply(jobs.policy(), jobs.headless_service("gpt"), jobs.indexed_job())
    _killed_and_back(cluster, namespace, "batch.kubernetes.io/job-name=gpt", reference)


def test_a_job_set_resumes_from_memory(
    cluster: Cluster, namespace: Kubectl, reference: dict[int, str]
) -> None:
    namespace.apply(jobs.policy(), jobs.job_set())
    trainers = "jobset.sigs.k8s.io/replicatedjob-name=trainers"
    _killed_and_back(cluster, namespace, trainers, reference)
    labels = [pod["metadata"]["labels"] for pod in namespace.list("pods", trainers)]
    assert sorted(found["keepstep.dev/node-rank"] for found in labels) == ["0", "10000"]


def test_a_stateful_set_resumes_from_memory(
    cluster: Cluster, namespace: Kubectl, reference: dict[int, str]
) -> None:
    namespace.apply(jobs.policy(), jobs.headless_service("gpt"), jobs.stateful_set())
    _killed_and_back(cluster, namespace, "job-name=gpt", reference)
    labels = {
        pod["metadata"]["name"]: pod["metadata"]["labels"]["keepstep.dev/node-rank"]
        for pod in namespace.list("pods", "job-name=gpt")
    }
    assert labels == {"gpt-0": "0", "gpt-1": "1"}
    job = runs.status(namespace)["job"]
    assert (job["kind"], job["name"]) == ("StatefulSet", "gpt")


def _killed_and_back(
    cluster: Cluster, kubectl: Kubectl, selector: str, reference: dict[int, str]
) -> None:
    first, second = kubectl.eventually(
        lambda: sorted(_names(kubectl.list("pods", selector))), what="two pods"
    )
    before = runs.training_beyond(kubectl, 15, pod=first)
    runs.kill_trainer(cluster, kubectl, second)
    life = runs.restarted(kubectl, pod=first)
    assert life.tier == "memory"
    assert life.first - 1 >= before.last - 2
    runs.same_losses(life, reference)
    runs.committed_beyond(kubectl, life.first)


def _names(pods: list[Object]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods] if len(pods) == 2 else []
