"""The webhook does not answer: pods start all the same, and somebody is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e import jobs, runs
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.kubectl import Kubectl


@pytest.fixture
def no_admission(cluster: Cluster) -> Iterator[None]:
    """A Service without endpoints."""
    with _scaled(cluster, 0):
        yield


@contextmanager
def _scaled(cluster: Cluster, replicas: int) -> Iterator[None]:
    system = cluster.kubectl.namespaced(NAMESPACE)
    component = "app.kubernetes.io/component=admission"
    system("scale", "deployment/keepstep-admission", f"--replicas={replicas}")
    try:
        system.eventually(lambda: len(system.list("pods", component)) == replicas, what="scaled")
        yield
    finally:
        system("scale", "deployment/keepstep-admission", "--replicas=2")
        system("rollout", "status", "deployment/keepstep-admission", "--timeout=90s", timeout_s=100)


@pytest.mark.usefixtures("no_admission")
def test_without_admission_pods_start_and_the_run_says_what_is_missing(namespace: Kubectl) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job())
    pods = namespace.eventually(
        lambda: len(found := namespace.list("pods")) == 2 and found, what="two pods"
    )
    assert all("keepstep.dev/injected" not in pod["metadata"].get("labels", {}) for pod in pods)
    (event, *_) = namespace.eventually(lambda: namespace.events("NotInjected"), what="an event")
    assert event["involvedObject"]["kind"] == "PyTorchJob"
    missing = namespace.eventually(
        lambda: (one := runs.condition(namespace, "FullyInjected"))["status"] == "False" and one,
        what="FullyInjected=False",
    )
    assert "gpt-" in missing["message"], "it names a pod"


def test_a_ca_bundle_that_somebody_emptied_is_filled_again(cluster: Cluster) -> None:
    kubectl = cluster.kubectl
    (before,) = kubectl.list("mutatingwebhookconfigurations", "app.kubernetes.io/name=keepstep")
    name = before["metadata"]["name"]
    kubectl(
        "patch", "mutatingwebhookconfiguration", name, "--type=json",
        "-p", '[{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": ""}]',
    )  # fmt: skip
    kubectl.eventually(
        lambda: (kubectl.get("mutatingwebhookconfiguration", name) or {})["webhooks"][0][
            "clientConfig"
        ]["caBundle"],
        within_s=90,
        what="the CA bundle is back",
    )
