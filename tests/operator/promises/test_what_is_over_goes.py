"""What belongs to a run goes with it; what somebody made meanwhile under its name does not."""

from __future__ import annotations

import time
from pathlib import Path

from tests.harness import until
from tests.operator.promises.surface import (
    Cluster,
    ends_when_its_kind_may_not_be_read,
    finished_run,
    pod,
    policy,
    rank,
    reconciler,
    report,
)


async def test_checkpoints_are_owned_by_their_run(tmp_path: Path) -> None:
    archive = {"s3": {"bucket": "b"}, "every": 10}
    cluster = Cluster(objects=dict([policy(archive=archive)]))
    token = cluster.bind(pod(0))
    async with reconciler(cluster, tmp_path, "--host-path", "/mnt/nvme0") as operator:
        await operator.take(report(rank(0, 1, local=(20,), archive=(10,))), token=token)
        await until(lambda: cluster.made("checkpoints"), what="a Checkpoint")
        (made,) = cluster.made("checkpoints")
    owners = made["metadata"].get("ownerReferences") or []
    assert [(one["kind"], one["uid"]) for one in owners] == [
        ("CheckpointRun", cluster.run()["metadata"]["uid"])
    ]


async def test_a_run_is_deleted_by_its_uid(tmp_path: Path) -> None:
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 30 * 24 * 3600.0))
    cluster = Cluster(objects=dict([policy(), finished_run("old", at=ended)]))
    async with reconciler(cluster, tmp_path):
        await until(lambda: cluster.asked("DELETE", "/checkpointruns/old"), what="its end")
    asked = cluster.asked("DELETE", "/checkpointruns/old")[0].body or {}
    assert (asked.get("preconditions") or {}).get("uid") == "u-old"


async def test_a_run_that_somebody_wrote_meanwhile_is_looked_at_again(tmp_path: Path) -> None:
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 30 * 24 * 3600.0))
    path, body = finished_run("old", at=ended)
    cluster, there = Cluster(objects=dict([policy()])), []
    cluster.add(path, body)

    def pin(method: str, at: str) -> None:
        """Just before its end comes, unseen by the watches."""
        if method == "DELETE" and at == path and not there:
            pins = {"spec": {"pins": ["0001.aaaaaaaa-000000005"]}}
            with cluster.unseen():
                there.append(cluster.add(path, cluster.objects[path] | pins))

    cluster.before = pin
    async with reconciler(cluster, tmp_path):
        asked = "/checkpointruns/old"
        await until(lambda: len(cluster.asked("DELETE", asked)) > 1, what="its end")
        assert path in cluster.objects


def test_a_run_whose_kind_of_job_may_not_be_read_ends() -> None:
    assert ends_when_its_kind_may_not_be_read(days=60)
