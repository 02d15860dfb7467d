"""Pods are deleted at random over all kinds of volumes: what was said before is what happens.

    KEEPSTEP_SOAK_ROUNDS=20 python -m pytest -m soak tests/soak/test_pods_deleted.py -s
    KEEPSTEP_SOAK_KINDS="ephemeral replicas" python -m pytest ...
    KEEPSTEP_SOAK_PODS=gpt-master-0 python -m pytest ...  # the run's leader

`survives` and the condition `Protected` say before each deletion whether the run goes on, and from
which step at the least. About every second pod has no grace period.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import dump, jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object

_ROUNDS = int(os.environ.get("KEEPSTEP_SOAK_ROUNDS", "20"))
_KINDS = os.environ.get("KEEPSTEP_SOAK_KINDS", "")
_DELETED = os.environ.get("KEEPSTEP_SOAK_PODS", "gpt-master-0 gpt-worker-0").split()
_FAILED = Path(__file__).parents[2] / "build" / "e2e" / "failed" / "pods_deleted"
_KILLED = ("--grace-period=0", "--force")
_NAMED = re.compile(r"(?:goes on from|goes back to) step (\d+)")


@dataclass(frozen=True)
class Promise:
    """What was said before: the step that the run goes on from at the least, None for step 0."""

    least: int | None


def _policies() -> dict[str, Object]:
    ephemeral = [{"name": "scratch", "ephemeral": {"size": "256Mi"}}]
    return {
        "empty-dir": jobs.policy(),
        "host-path": jobs.policy(host_path=True),
        "ephemeral": jobs.policy(volumes=ephemeral),
    }


@pytest.fixture
def teams(cluster: Cluster) -> Iterator[dict[str, Kubectl]]:
    """A job of two pods on one node for each kind of volumes, with replicas and with shards."""
    made = dict[str, Kubectl]()
    for kind, policy in _policies().items():
        for state, node in zip(("replicas", "shards"), cluster.workers(), strict=False):
            if _KINDS not in f"{kind} {state}":
                continue
            name = f"deleted-{kind}-{state}-{int(time.time())}"
            cluster.kubectl("create", "namespace", name)
            kubectl = made[f"{kind} {state}"] = cluster.kubectl.namespaced(name)
            on = {"nodeSelector": {"kubernetes.io/hostname": node}}
            job = (jobs.pytorch_job(spec=on),)
            kubectl.apply(policy, *(jobs.sharded_job(node=node) if state == "shards" else job))
    yield made
    for kubectl in made.values():
        cluster.kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_predicted_outcome_of_a_pod_deletion_matches_the_actual_one(
    teams: dict[str, Kubectl], cluster: Cluster
) -> None:
    seed = int(os.environ.get("KEEPSTEP_SOAK_SEED", str(random.randrange(1 << 30))))
    chance, wrong = random.Random(seed), list[str]()
    for kubectl in teams.values():
        runs.committed_beyond(kubectl, 10, within_s=400)
    for number in range(_ROUNDS):
        kind = chance.choice(sorted(teams))
        pod, kubectl = chance.choice(_DELETED), teams[kind]
        how, options = chance.choice([("is deleted", ()), ("is killed", _KILLED)])
        promised, began = _promise(kubectl), time.time()
        kubectl("delete", "pod", pod, "--wait=false", *options)
        life = _next_life(kubectl, began)
        right = life.first == 0 if promised.least is None else life.first > promised.least
        line = f"{number} {kind} {pod} {how}: said {promised.least}, began at {life.first}"
        print(f"soak {line}{'' if right else ' WRONG'}", flush=True)
        if not right:
            wrong.append(line)
            dump.namespace(cluster, kubectl, _FAILED / str(number))
        runs.committed_beyond(kubectl, life.first + 5, within_s=200)
    assert not wrong, f"seed {seed}"


def _promise(kubectl: Kubectl) -> Promise:
    """What the status says once the condition is True."""
    message = runs.becomes(kubectl, "Protected", within_s=120)["message"]
    if "PodRestart" not in runs.status(kubectl)["survives"]:
        assert "the run then begins at step 0" in message, message
        return Promise(None)
    of_pods = [part for part in message.split("; ") if "pod" in part and _NAMED.search(part)]
    assert of_pods, message
    return Promise(min(int(_NAMED.search(part)[1]) for part in of_pods))  # type: ignore[index]


def _next_life(kubectl: Kubectl, began: float) -> jobs.Life:
    def probe() -> jobs.Life | None:
        life = jobs.life(kubectl, "gpt-master-0")
        return life if life and life.began_at > began and life.last > life.first + 2 else None

    found: jobs.Life = kubectl.eventually(probe, within_s=240, what="the next life")
    return found
