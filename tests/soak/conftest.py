"""The cluster of the soak tests: as that of the end-to-end tests, with quick restarts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
        yield made
    finally:
        made.down()
