"""A pod that was replaced knows only its own epochs, and is no stranger to the archive for that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keepstep.core.shard import Shard
from keepstep.steps import Epoch, EpochId, StepId, shard_name
from keepstep_sidecar.commit.lineage import collect_epoch_ancestors
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive.index import ArchiveContents, Surveyor
from keepstep_sidecar.tiers.archive.step_record import StepRecord
from keepstep_sidecar.tiers.archive.store import open_store

FIRST = Epoch(EpochId(1, "00000001"))
SECOND = Epoch(EpochId(2, "00000002"), StepId(FIRST.id, 1500))
THIRD = Epoch(EpochId(3, "00000003"), StepId(SECOND.id, 1700))
STRANGER = Epoch(EpochId(1, "99999999"))


def archived(root: Path, step_id: StepId, *epochs: Epoch) -> None:
    """A whole step of one rank, whose record lists these epochs."""
    directory, name = root / "run" / str(step_id), shard_name(0, 1)
    directory.mkdir(parents=True)
    (directory / name).write_bytes(b"x" * 10)
    shard = Shard(step_id=step_id, rank=0, world=1, size_bytes=10, root="a")
    record = StepRecord(
        run="run", id=step_id, world=1, epochs=epochs, shards=(shard,), written_at=1.0
    )
    (directory / "step.json").write_bytes(record.to_json())


def survey(root: Path, *own: Epoch) -> ArchiveContents:
    async def scan() -> ArchiveContents:
        store = open_store(ArchiveConfig(url=str(root)))
        try:
            return await Surveyor(store, "run").survey(own)
        finally:
            await store.close()

    return asyncio.run(scan())


def test_a_pod_that_has_only_the_newest_epoch_causes_no_run_conflict(tmp_path: Path) -> None:
    archived(tmp_path, StepId(FIRST.id, 1000), FIRST)
    assert survey(tmp_path, THIRD).conflict == ""


def test_later_jobs_can_restore_steps_that_a_pod_with_only_the_newest_epoch_archived(
    tmp_path: Path,
) -> None:
    archived(tmp_path, StepId(FIRST.id, 1000), FIRST)
    archived(tmp_path, StepId(THIRD.id, 2000), THIRD)
    found = survey(tmp_path)
    assert found.conflict == ""
    assert [step.id.step for step in found.complete_steps] == [1000, 2000]


@pytest.mark.parametrize("own", [(STRANGER,), (STRANGER, SECOND)], ids=["began", "went on"])
def test_two_runs_with_unrelated_first_epochs_conflict(
    tmp_path: Path, own: tuple[Epoch, ...]
) -> None:
    other = StepId(EpochId(4, "44444444"), 1)
    archived(tmp_path, other, Epoch(other.epoch))
    assert "shared by two runs" in survey(tmp_path, *own).conflict


def test_the_ancestors_of_an_epoch_end_at_the_first_unknown_parent() -> None:
    assert collect_epoch_ancestors([THIRD], [STRANGER, FIRST, SECOND]) == (FIRST, SECOND, THIRD)
    assert collect_epoch_ancestors([THIRD], [FIRST]) == (THIRD,), (
        "who is beyond a gap cannot be known"
    )


def test_the_ancestors_of_a_fork_exclude_the_epochs_of_the_original_run() -> None:
    forked = Epoch(EpochId(2, "22222222"), StepId(FIRST.id, 7), "other")
    assert collect_epoch_ancestors([forked], [FIRST]) == (forked,)
