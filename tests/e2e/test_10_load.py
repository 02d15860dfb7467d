"""A burst of pods: what admission takes, by its own histogram. Printed, and bounded generously."""

from __future__ import annotations

import re

from tests.e2e import jobs
from tests.e2e.cluster import ADMISSION, NAMESPACE, Cluster
from tests.e2e.kubectl import Kubectl

_PODS = 500
_BUCKET = re.compile(r'^keepstep_admission_seconds_bucket\{(?:.*,)?le="([^"]+)"(?:,.*)?\} (\S+)$')


def test_five_hundred_pods_in_a_burst_are_injected(
    cluster: Cluster, namespace: Kubectl, cluster_alone: None, measured: dict[str, float]
) -> None:
    namespace.apply(jobs.policy())
    owner = jobs.owner(namespace)
    cluster.admission_settled()  # after a node that a test before took away
    jobs.all_inject(namespace, owner)
    before = _histogram(cluster)
    made = jobs.admitted(namespace, *(jobs.owned_pod(f"p{n}", owner) for n in range(_PODS)))
    assert len(made) == _PODS
    for pod in made:
        names = [container["name"] for container in pod["spec"]["initContainers"]]
        assert names == ["keepstep-sidecar"], pod["metadata"]["name"]

    counts = {le: count - before.get(le, 0.0) for le, count in _histogram(cluster).items()}
    total = counts[float("inf")]
    assert total >= _PODS
    p99 = min(le for le, count in counts.items() if count >= 0.99 * total)
    measured[f"p99 of {total:.0f} admission reviews in a burst, at most"] = p99
    assert p99 <= 1.0, "within the webhook's 10 s, by far"


def _histogram(cluster: Cluster) -> dict[float, float]:
    """Upper bound in seconds -> reviews up to it, over all admission pods."""
    system = cluster.kubectl.namespaced(NAMESPACE)
    sums: dict[float, float] = {}
    for pod in system.list("pods", ADMISSION):
        if "deletionTimestamp" in pod["metadata"]:
            continue  # of a test before
        name = pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:9090/proxy/metrics"
        for line in system("get", "--raw", path).splitlines():
            if match := _BUCKET.match(line):
                sums[float(match[1])] = sums.get(float(match[1]), 0.0) + float(match[2])
    return sums
