"""Pods that leave with a grace period take no finished step with them: drains, preemptions and
taints of the node on which the second pod of several jobs runs, one round after the other.

    KEEPSTEP_SOAK_ROUNDS=2 python -m pytest -m soak tests/soak/test_leaving.py -s
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import TRAINER, Cluster
from tests.e2e.kubectl import Object
from tests.soak import record, team
from tests.soak.record import Record, Struck
from tests.soak.team import WORKER, Seen, Team

_TEAMS = 3
_SEAT = "keepstep.dev/seat"
_PRIORITY = "keepstep-soak-first"


def _drained(cluster: Cluster, teams: list[Team]) -> None:
    node = teams[0].nodes[1]
    try:
        cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", timeout_s=400
        )
    finally:
        cluster.kubectl("uncordon", node)


def _tainted(cluster: Cluster, teams: list[Team]) -> None:
    node, taint = teams[0].nodes[1], f"{_SEAT}=taken:NoExecute"
    pods = {job.name: job.pod(WORKER)["metadata"]["uid"] for job in teams}
    try:
        cluster.kubectl("taint", "node", node, taint)
        for job in teams:
            _gone(job, pods[job.name])
    finally:
        cluster.kubectl("taint", "node", node, f"{taint}-")


def _preempted(cluster: Cluster, teams: list[Team]) -> None:
    """Somebody more important asks for the seat of each worker, takes it, and goes again."""
    pods = {job.name: job.pod(WORKER)["metadata"]["uid"] for job in teams}
    for job in teams:
        job.kubectl.apply(_important(job))
    for job in teams:
        _gone(job, pods[job.name])
        job.kubectl("delete", "pod", "important", "--wait=true", timeout_s=120)


def _gone(job: Team, uid: str) -> None:
    def probe() -> bool:
        pod = job.kubectl.get("pod", WORKER)
        return pod is None or pod["metadata"]["uid"] != uid

    job.kubectl.eventually(probe, within_s=150, what=f"{job.name}: the worker leaves")


def _important(job: Team) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "important"},
        "spec": {
            "priorityClassName": _PRIORITY,
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"kubernetes.io/hostname": job.nodes[1]},
            "containers": [
                {
                    "name": "important",
                    "image": TRAINER,
                    "command": ["sleep", "600"],
                    "resources": {"limits": {job.seat: "1"}},
                }
            ],
        },
    }


@contextmanager
def _seats(cluster: Cluster) -> Iterator[None]:
    """One seat a job on each node, and a priority above that of training pods."""
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": _PRIORITY},
        "value": 1000,
    }
    cluster.kubectl.apply(priority)
    paths = [f"/status/capacity/{_SEAT.replace('/', '~1')}-{index}" for index in range(_TEAMS)]
    for node in cluster.workers():
        given = json.dumps([{"op": "add", "path": path, "value": "1"} for path in paths])
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", given)
    try:
        yield
    finally:
        cluster.kubectl.attempt("delete", "priorityclass", _PRIORITY)


WAYS: dict[str, Callable[[Cluster, list[Team]], None]] = {
    "drained": _drained,
    "preempted": _preempted,
    "tainted": _tainted,
}


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_pods_that_terminate_within_their_grace_period_lose_no_finished_step(
    cluster: Cluster,
) -> None:
    rounds = int(os.environ.get("KEEPSTEP_SOAK_ROUNDS", "7"))
    kept = Record(team.SCRATCH / "leaving.jsonl", of=rounds * len(WAYS) * _TEAMS)
    with _seats(cluster), team.training(cluster, _TEAMS, seat=_SEAT) as teams:
        for number in range(rounds):
            for name, leave in WAYS.items():
                before = {job.name: job.well() for job in teams}
                began, at = time.monotonic(), time.time()
                leave(cluster, teams)
                for job in teams:
                    struck = _struck(number, job, before[job.name], name, at, began)
                    kept.add(struck)
    record.write(kept.summary(jobs=_TEAMS, broken_promises=0), "leaving")


def _struck(number: int, job: Team, before: Seen, name: str, at: float, began: float) -> Struck:
    now = job.lives_on(before, ends=True, within_s=300)
    restored, ended = now.life.first - 1, job.ended(before)
    assert restored >= before.life.last, f"{job.name} {name}: {before.life.last} was finished"
    # the last step of rank 0 may be one that the other rank was stopped in, before its own end
    assert restored >= ended.last - 1, f"{job.name} {name}: {restored} of {ended.last}"
    job.check_parent()
    return Struck(
        number=number,
        team=job.name,
        fault=name,
        at=at,
        step=before.life.last,
        floor=before.life.last,
        restored=restored,
        tier=now.life.tier,
        lost=max(0, ended.last - restored),
        seconds=time.monotonic() - began,
    )
