"""The archive of a run as it lies on its store's drive, and what must always be true of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from keepstep.steps import Epoch, EpochId, StepId, shard_name
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive.browse import open_archived_run
from keepstep_sidecar.tiers.archive.index import ArchiveContents, ArchivedStep
from tests.e2e.cluster import Cluster, run
from tests.e2e.kubectl import Kubectl
from tests.e2e.stores import BUCKET
from tests.harness import layout_of, verify_image

_VOLUME = "/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/data"


@dataclass(frozen=True)
class Lineage:
    """What is archived, and the run's epochs as the records tell them, oldest first."""

    steps: tuple[StepId, ...]
    epochs: tuple[Epoch, ...]

    def alive(self, step_id: StepId) -> bool:
        """Whether the newest epoch descends from this step, or holds it."""
        known = {epoch.id: epoch for epoch in self.epochs}
        at, end = max(known), None
        while at != step_id.epoch:
            if (parent := known[at].parent) is None:
                return False
            at, end = parent.epoch, parent.step
        return end is None or step_id.step <= end

    def parent(self, epoch: EpochId) -> StepId | None:
        """From which step this epoch went on."""
        (found,) = [candidate.parent for candidate in self.epochs if candidate.id == epoch]
        return found


def fetched(cluster: Cluster, kubectl: Kubectl, into: Path) -> Path:
    """A copy of the archive from the drive of the store's pod. Nobody may be writing to it."""
    (pod,) = kubectl.list("pods", "app=s3")
    path = f"{_VOLUME.format(uid=pod['metadata']['uid'])}/{BUCKET}/runs/{kubectl.namespace}"
    run("docker", "cp", f"{pod['spec']['nodeName']}:{path}", str(into))
    return into / kubectl.namespace


def checked(archive: Path, name: str) -> Lineage:
    """Every shard of every archived step, byte by byte: of this run, of its directory's step and
    epoch, and of the parent that the record names. A parent is older than its child, and of each
    step number at most one directory is alive."""
    survey = asyncio.run(_survey(archive, name))
    assert not survey.conflict
    assert not survey.faults
    lineage = Lineage(tuple(step.id for step in survey.complete_steps), survey.epochs)
    for step in survey.complete_steps:
        _check(archive, step, name)
    for epoch in lineage.epochs:
        assert epoch.parent is None or epoch.parent.epoch < epoch.id, f"{epoch} is its own parent"
    alive = [step_id.step for step_id in lineage.steps if lineage.alive(step_id)]
    assert len(alive) == len(set(alive)), f"two living steps of one number: {sorted(alive)}"
    return lineage


async def _survey(archive: Path, name: str) -> ArchiveContents:
    async with open_archived_run(ArchiveConfig(url=str(archive)), name) as holding:
        return await holding.survey()


def _check(archive: Path, step: ArchivedStep, name: str) -> None:
    assert step.record is not None
    parents = {epoch.id: epoch.parent for epoch in step.record.epochs}
    for shard in step.record.shards:
        path = archive / name / str(step.id) / shard_name(shard.rank, shard.world)
        data = memoryview(path.read_bytes())
        control = verify_image(data, layout_of(path), path=path, run=name, step_id=step.id)
        assert control.rank == shard.rank
        assert control.root == shard.root
        assert control.epoch.parent == parents[control.epoch.id], f"{path} tells another lineage"


def epochs_on(cluster: Cluster, node: str, directory: str) -> tuple[Epoch, ...]:
    """The epochs that a pod's volume knows of."""
    body = json.loads(cluster.on_node(node, "cat", f"{directory}/run.json"))
    return tuple(
        Epoch(
            EpochId.parse(epoch["id"]), StepId.parse(epoch["parent"]) if epoch["parent"] else None
        )
        for epoch in body["epochs"]
    )
