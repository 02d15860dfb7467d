"""What an older version began goes on under this one: runs, Checkpoint objects, the notes of their
directories, and pods with its sidecar and library, which report to the new reconciler.

    KEEPSTEP_SOAK_FROM=e774dd7 python -m pytest -m soak tests/soak/test_upgrade_from.py -s
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import jobs, runs
from tests.e2e.cluster import (
    HELPERS,
    NAMESPACE,
    RELEASE,
    Cluster,
    build_ours,
    build_trainer,
    run,
)
from tests.e2e.kubectl import Kubectl, Object

_FROM = os.environ.get("KEEPSTEP_SOAK_FROM", "e774dd7")
_NAME = "upgraded"
_NOTES = "keepstep.dev/run-directories"


@pytest.fixture
def older(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """The older version is installed in place of this one's release."""
    packed = tmp_path / "older.tar"
    run("git", "archive", "-o", str(packed), _FROM)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "older", filter="data")
    tree = str(tmp_path / "older")
    cluster.load([*build_ours(tree, _FROM), *build_trainer(tree, _FROM)])
    _uninstall(cluster)
    tags = f"images.operator.tag={_FROM},images.sidecar.tag={_FROM}"
    cluster.install("--set", tags, tree=tree)
    try:
        yield
    finally:
        cluster.kubectl("delete", "namespace", _NAME, "--wait=true", timeout_s=300)
        _uninstall(cluster)
        cluster.install()


def _uninstall(cluster: Cluster) -> None:
    cluster.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "120s")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("older")
def test_what_an_older_version_began_goes_on(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", _NAME)
    kubectl = cluster.kubectl.namespaced(_NAME)
    job = jobs.pytorch_job(
        policy="node-local", run="gpt", image=f"keepstep/example-gpt:{_FROM}", steps=100_000
    )
    keeps = {"local": {"last": 200}}  # what is pinned must still be there then
    kubectl.apply(jobs.policy("node-local", host_path=True, retention=keeps), job)
    runs.training_beyond(kubectl, 5)
    runs.kill_trainer(cluster, kubectl, "gpt-worker-0")
    life = runs.restarted(kubectl, within_s=240)
    _pin(kubectl, runs.committed_beyond(kubectl, life.first))
    kubectl.eventually(lambda: kubectl.list("checkpoints"), what="a Checkpoint")
    kubectl.eventually(
        lambda: _notes(cluster, NAMESPACE), within_s=90, what="a note of directories"
    )
    # a restart that not all ranks told of is counted after 35 s, four steps each
    committed = runs.committed_beyond(kubectl, life.first + 200, within_s=300)
    before, pinned = runs.the_run(kubectl), kubectl.list("checkpoints")

    cluster.install()
    kubectl.eventually(lambda: _notes(cluster, HELPERS), within_s=120, what="the note moves")
    kubectl.eventually(lambda: not _notes(cluster, NAMESPACE), what="the note moves")
    committed = runs.committed_beyond(kubectl, committed + 20, within_s=240)
    after = runs.the_run(kubectl)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["restarts"] == before["status"]["restarts"]
    assert after["status"]["recent"] == before["status"]["recent"]
    assert runs.training_beyond(kubectl, committed).began_at == life.began_at, "nothing restarted"
    kubectl.eventually(lambda: _same(pinned, kubectl), what="the pinned Checkpoint stays")
    for kind in ("Protected", "FullyInjected", "Committing"):
        runs.becomes(kubectl, kind)

    kubectl("delete", "pod", "gpt-worker-0", "--wait=true", timeout_s=200)
    anew = kubectl.eventually(lambda: _another(kubectl, life), within_s=300, what="a new life")
    assert anew.first > committed, "it goes on from what the older sidecars wrote"
    assert runs.committed_beyond(kubectl, anew.first, within_s=240)
    assert _same(pinned, kubectl)
    print(f"from {_FROM}: {committed} committed after the upgrade, back at {anew.first}")


def _another(kubectl: Kubectl, life: jobs.Life) -> jobs.Life | None:
    now = jobs.life(kubectl, "gpt-master-0")
    return now if now is not None and now.began_at != life.began_at and now.losses else None


def _pin(kubectl: Kubectl, step: int) -> None:
    body = runs.the_run(kubectl)
    id = body["status"]["committed"]["id"]
    assert body["status"]["committed"]["step"] >= step
    patch = json.dumps({"spec": {"pins": [id]}})
    kubectl("patch", "checkpointrun", body["metadata"]["name"], "--type=merge", "-p", patch)


def _same(pinned: list[Object], kubectl: Kubectl) -> bool:
    now = {one["metadata"]["uid"]: one["spec"] for one in kubectl.list("checkpoints")}
    return all(now.get(one["metadata"]["uid"]) == one["spec"] for one in pinned)


def _notes(cluster: Cluster, namespace: str) -> list[Object]:
    found = cluster.kubectl.namespaced(namespace).list("configmaps", _NOTES)
    return [one for one in found if _NAME in json.dumps(one.get("data", {}))]
