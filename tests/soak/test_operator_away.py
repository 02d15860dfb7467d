"""The operator is away for an hour: commits of steps that lie on several nodes, retention, copies
to peers, the archive and restarts go on, also while containers are killed.

    KEEPSTEP_SOAK_OPERATOR_AWAY_S=600 python -m pytest -m soak tests/soak/test_operator_away.py -s
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from keepstep.steps import StepId
from tests.e2e import runs, tiers
from tests.e2e.cluster import NAMESPACE, RECONCILE, Cluster
from tests.harness import eventually
from tests.soak import team
from tests.soak.team import MASTER, PODS, STEP_S, Team

_AWAY_S = float(os.environ.get("KEEPSTEP_SOAK_OPERATOR_AWAY_S", "3600"))
_EACH_S = 40.0
_MOST_SHARDS = 8
"""Of one rank on its volume: two committed steps, and what is being written or waits to be sent."""


@pytest.mark.soak
@pytest.mark.timeout(_AWAY_S + 1800)
def test_an_hour_without_the_operator_does_not_affect_a_run(cluster: Cluster) -> None:
    dice = random.Random(30)
    with team.training(cluster, 1) as (job,):
        began, kills = job.well(), 0
        with _operator_away(cluster):
            until = time.monotonic() + _AWAY_S
            for pod, container in itertools.cycle(
                [(MASTER, tiers.SIDECAR), (PODS[1], "pytorch"), (PODS[1], tiers.SIDECAR)]
            ):
                if time.monotonic() > until:
                    break
                committed = _all_go_on(job)
                before = job.seen()
                time.sleep(dice.uniform(0, 5))
                cluster.kill_container(job.pod(pod), container)
                kills += 1
                after = job.lives_on(before, ends=container == "pytorch", within_s=300)
                if container == "pytorch":
                    assert after.life.first > committed, "no committed step is lost"
                print(
                    f"soak: {container} of {pod} was killed, {after.life.last} is trained",
                    flush=True,
                )
                time.sleep(max(0.0, min(_EACH_S, until - time.monotonic())))
            committed = _all_go_on(job)
        runs.committed_beyond(job.kubectl, committed)
        job.check_parent()
        print(f"without the operator: {kills} kills, {committed - began.committed} steps committed")
        assert committed - began.committed > 0.3 * _AWAY_S / STEP_S, "and was not slowed"


def _all_go_on(job: Team) -> int:
    """Wait until each tier has a step that is newer than all that are there now, in the directories
    themselves; the committed step. Old steps must go."""
    own = _beyond("committed", lambda: min(job.published(rank) for rank in range(2)))
    _beyond("copies", lambda: min(_newest(job, rank, copies=True) for rank in range(2)))
    _beyond("archived", lambda: _archived(job))
    eventually(
        lambda: max(_shards(job, rank) for rank in range(2)) <= _MOST_SHARDS,
        within_s=30,
        what="what is retired is deleted",
    )
    return own


def _beyond(what: str, probe: Callable[[], int]) -> int:
    before = probe()

    def newer() -> int | None:
        now = probe()
        return now if now > before else None

    found: int = eventually(newer, within_s=120, every_s=1.0, what=f"{what} after step {before}")
    return found


def _shards(job: Team, rank: int) -> int:
    return len(tiers.shards(job.cluster, job.nodes[rank], job.directory(rank)))


def _newest(job: Team, rank: int, *, copies: bool) -> int:
    found = tiers.shards(job.cluster, job.nodes[rank], job.directory(rank), copies=copies)
    return max((StepId.parse(path.split("/")[-2]).step for path in found), default=-1)


def _archived(job: Team) -> int:
    """The newest step of which the store has every shard."""
    script = f"find {job.store} -name 'rank-*.safetensors' 2>/dev/null; true"
    paths = job.cluster.on_node(job.nodes[0], "sh", "-c", script).splitlines()
    names = [path.split("/")[-2] for path in paths]
    return max((StepId.parse(name).step for name in names if names.count(name) == 2), default=-1)


@contextmanager
def _operator_away(cluster: Cluster) -> Iterator[None]:
    system = cluster.kubectl.namespaced(NAMESPACE)
    system("scale", "deployment/keepstep-reconcile", "--replicas=0")
    system.eventually(lambda: not system.list("pods", RECONCILE), what="the reconciler is gone")
    try:
        yield
    finally:
        system("scale", "deployment/keepstep-reconcile", "--replicas=1")
