"""Two thousand pods in the API server: what the reconciler has in memory. Printed, and bounded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.e2e import jobs, runs
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.kubectl import Kubectl

_PODS, _RUNS = 2000, 200


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[Kubectl]:
    name = f"many-{int(time.time()) % 10**6:06d}"
    cluster.kubectl("create", "namespace", name)
    yield cluster.kubectl.namespaced(name)
    cluster.kubectl("delete", "namespace", name, "--wait=true", timeout_s=900)  # none is in the way


@pytest.mark.soak
@pytest.mark.timeout(700, func_only=True)
def test_two_thousand_pods_of_two_hundred_runs_fit_into_the_reconciler(
    cluster: Cluster, namespace: Kubectl
) -> None:
    """Real objects, which no node takes, and so without reports."""
    namespace.apply(jobs.policy())
    owner = jobs.owner(namespace)
    pods = [jobs.owned_pod(f"p{number}", owner) for number in range(_PODS)]
    for number, pod in enumerate(pods):
        pod["metadata"]["labels"] = {"keepstep.dev/run": f"r{number % _RUNS}"}
        pod["spec"]["nodeSelector"] = {"keepstep.dev/nowhere": "true"}
    body = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    namespace("create", "-f", "-", "-o", "name", input=body, timeout_s=400)

    found = namespace.eventually(
        lambda: len(namespace.list("ckrun")) == _RUNS and _resident_mib(cluster),
        within_s=200,
        what="every run has its object",
    )
    print(f"reconciler with {_PODS} pods: {found:.0f} MiB resident", flush=True)
    assert found < 200 * 1e6 / 2**20, "the bar of 200 MB"


def _resident_mib(cluster: Cluster) -> float:
    """Of the reconciler's process."""
    system = cluster.kubectl.namespaced(NAMESPACE)
    (pod,) = system.list("pods", "app.kubernetes.io/component=reconcile")
    return runs.resident_mib(cluster, *cluster.process(pod, "reconcile"))
