"""Runs that are over wait for their TTL; those that train do not wait for them."""

from __future__ import annotations

import time
from pathlib import Path

from tests.harness import until
from tests.operator.promises.surface import (
    Cluster,
    finished_run,
    pod,
    policy,
    promised,
    rank,
    reconciler,
    report,
)

FINISHED = 400
PODS = 10


def _cluster() -> tuple[Cluster, list[str]]:
    """One run that trains, many that ended an hour ago."""
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600.0))
    runs = [finished_run(f"old-{number:08x}", at=ended) for number in range(FINISHED)]
    cluster = Cluster(objects=dict([policy(), *runs]))
    return cluster, [cluster.bind(pod(number)) for number in range(PODS)]


async def test_reports_come_no_less_often_beside_finished_runs(tmp_path: Path) -> None:
    cluster, tokens = _cluster()
    async with reconciler(cluster, tmp_path) as operator:
        await until(lambda: operator.knows(PODS), what="all pods")
        for number, token in enumerate(tokens):
            reply = await operator.take(report(rank(number, PODS, local=(1,))), token=token)
        assert reply["least_gap_s"] <= 2.0


async def test_statuses_are_written_no_later_beside_finished_runs(tmp_path: Path) -> None:
    cluster, tokens = _cluster()
    async with reconciler(cluster, tmp_path) as operator:
        await until(lambda: operator.knows(PODS), what="all pods")
        await until(lambda: cluster.run().get("status"), what="a first status")
        for number, token in enumerate(tokens):
            await operator.take(report(rank(number, PODS, local=(1,))), token=token)
        await promised(
            lambda: cluster.run()["status"].get("committed"),
            "the commit does not show in the status",
            within_s=5.0,
        )
