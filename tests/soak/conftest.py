"""The cluster of the soak tests: as that of the end-to-end tests, with quick restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e import jobs
from tests.e2e.cluster import ROOT, Cluster

_QUICK = """
grep -q KubeletCrashLoopBackOffMax /var/lib/kubelet/config.yaml && exit 0
sed -i 's/^crashLoopBackOff:.*/crashLoopBackOff: {maxContainerRestartPeriod: "1s"}/' \
    /var/lib/kubelet/config.yaml
printf 'featureGates: {KubeletCrashLoopBackOffMax: true}\\n' >> /var/lib/kubelet/config.yaml
systemctl restart kubelet
"""
"""Containers restart at once, not after the usual backoff of up to 5 minutes."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    made = Cluster(ROOT / "build" / "e2e")
    try:
        made.up()
        for node in made.workers():
            made.on_node(node, "sh", "-c", _QUICK)
        system = made.kubectl.namespaced("default")
        job = json.dumps(jobs.pytorch_job(policy=None))
        # kubelets that begin anew take pods from their Services for a while: webhooks, too
        made.kubectl.eventually(
            lambda: system("create", "--dry-run=server", "-f", "-", input=job),
            what="jobs are admitted",
        )
        yield made
    finally:
        made.down()
