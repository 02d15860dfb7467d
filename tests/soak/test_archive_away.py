"""The archive is away for ten minutes: training goes on, memory stays flat, it catches up with all
that is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from keepstep.steps import StepId
from tests.e2e import runs, stores, tiers
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl
from tests.soak.team import MASTER, PODS, STEP_S, tiny

_AWAY_S = float(os.environ.get("KEEPSTEP_SOAK_AWAY_S", "600"))
_WARM_S = 30.0
_EVERY, _KEPT = 10, 200
_GROWTH_MIB = 16.0


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[Kubectl]:
    name = f"away-{int(time.time()) % 10**6:06d}"
    cluster.kubectl("create", "namespace", name)
    yield cluster.kubectl.namespaced(name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_steps_are_archived_oldest_first_after_the_archive_was_unreachable_for_ten_minutes(
    cluster: Cluster, namespace: Kubectl
) -> None:
    stores.start(namespace)
    job = tiers.job(*cluster.workers(), run=namespace.namespace)
    tiny(job, "--step-seconds", str(STEP_S))
    namespace.apply(tiers.policy(archive_every=_EVERY, kept=_KEPT), job)
    # as many steps lie there as ever will: what grows from now on does so as the archive is away
    warm = runs.training_beyond(namespace, 2 * _KEPT, within_s=300)
    tiers.beyond(namespace, "archive", 2 * _KEPT)
    namespace("scale", "deployment/s3", "--replicas=0")
    time.sleep(_WARM_S)  # its first retries are part of what is compared with
    before = _resident_mib(cluster, namespace)
    newest = tiers.watermark(namespace, "archive")
    time.sleep(_AWAY_S - _WARM_S)
    after = _resident_mib(cluster, namespace)
    assert runs.condition(namespace, "Archived")["status"] == "False", "it is said"
    life = runs.training_beyond(namespace, 0)
    assert life.first == 0, "the trainers never ended"
    assert life.last - warm.last > 0.7 * _AWAY_S / STEP_S, "and were not slowed"
    print(f"sidecars: {before} MiB, after {_AWAY_S:g} s {after} MiB", flush=True)
    for pod, mib in after.items():
        assert mib < before[pod] + _GROWTH_MIB, f"{pod}: from {before[pod]} to {mib} MiB"

    namespace("scale", "deployment/s3", "--replicas=1")
    tiers.beyond(namespace, "archive", life.last, within_s=240)
    sent = [
        line for line in tiers.logged(namespace, MASTER) if line["event"] == "archive.step_uploaded"
    ]
    steps = [StepId.parse(line["step"]).step for line in sent]
    assert steps == sorted(steps), "oldest first"
    late = [step for step in steps if newest < step <= life.last]
    print(f"caught up with {late}, kept were those from about {life.last - _KEPT} on", flush=True)
    # what is kept moves on while the store starts and is found again
    assert len(late) >= _KEPT // _EVERY // 4, "all that was kept, not only the newest"


def _resident_mib(cluster: Cluster, kubectl: Kubectl) -> dict[str, float]:
    found = {}
    for pod in PODS:
        body = kubectl.get("pod", pod)
        assert body is not None
        found[pod] = round(runs.resident_mib(cluster, *cluster.process(body, tiers.SIDECAR)), 1)
    return found
