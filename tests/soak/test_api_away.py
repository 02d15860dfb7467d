"""The API server is away for an hour: training goes on, and so do commits of steps that lie on
several nodes.

    KEEPSTEP_SOAK_API_AWAY_S=600 python -m pytest -m soak tests/soak/test_api_away.py -s
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e import runs
from tests.e2e.cluster import Cluster
from tests.harness import eventually
from tests.soak import team
from tests.soak.team import STEP_S, Team

_AWAY_S = float(os.environ.get("KEEPSTEP_SOAK_API_AWAY_S", "3600"))
_POLL_S = 60.0
_MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"


@pytest.mark.soak
@pytest.mark.timeout(_AWAY_S + 1800)
def test_an_hour_without_the_api_server_stops_no_commit(cluster: Cluster) -> None:
    with team.training(cluster, 1) as (job,):
        before = job.well()
        with _api_server_away(cluster):
            began, published = time.monotonic(), [before.committed]
            while (gone_s := time.monotonic() - began) < _AWAY_S:
                published.append(_published_beyond(job, published[-1]))
                print(f"soak {gone_s / 60:4.1f} min, committed: {published[-1]}", flush=True)
                time.sleep(_POLL_S)
        after = job.lives_on(before, ends=False, within_s=300)
        runs.committed_beyond(job.kubectl, published[-1])
        trained = after.life.last - before.life.last
        assert published[-1] - before.committed > 0.7 * _AWAY_S / STEP_S, "and was not slowed"
        print(f"without the API server: {trained} steps trained, {published[-1]} is committed")


def _published_beyond(job: Team, step: int) -> int:
    """Wait until a newer step is published on both nodes; its number."""

    def probe() -> int | None:
        newest = min(job.published(rank) for rank in range(2))
        return newest if newest > step else None

    found: int = eventually(probe, within_s=60, every_s=1.0, what=f"a commit after {step}")
    return found


@contextmanager
def _api_server_away(cluster: Cluster) -> Iterator[None]:
    (node,) = [node for node in cluster.nodes() if "control-plane" in node]
    cluster.on_node(node, "mv", _MANIFEST, "/root/kube-apiserver.yaml")
    try:
        eventually(lambda: not _serves(cluster, node), every_s=1.0, what="the API server ends")
        yield
    finally:
        cluster.on_node(node, "mv", "/root/kube-apiserver.yaml", _MANIFEST)
        eventually(
            lambda: cluster.kubectl.attempt("get", "--raw", "/readyz").returncode == 0,
            within_s=300,
            every_s=2.0,
            what="the API server is back",
        )


def _serves(cluster: Cluster, node: str) -> bool:
    return bool(cluster.on_node(node, "sh", "-c", "pgrep -x kube-apiserver || true").strip())
