"""A pod that was replaced knows only its own epochs, and is no stranger to the archive for that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keepstep.core.shard import Shard
from keepstep.steps import Epoch, EpochId, StepId, shard_name
from keepstep_sidecar.commit.lineage import ancestors_of
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive.index import Survey, Surveyor
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


def survey(root: Path, *own: Epoch) -> Survey:
    async def scan() -> Survey:
        store = open_store(ArchiveConfig(url=str(root)))
        try:
            return await Surveyor(store, "run").survey(own)
        finally:
            await store.close()

    return asyncio.run(scan())


def test_a_pod_that_knows_only_the_newest_epoch_is_of_the_same_run(tmp_path: Path) -> None:
    archived(tmp_path, StepId(FIRST.id, 1000), FIRST)
    assert survey(tmp_path, THIRD).conflict == ""


def test_what_such_a_pod_has_archived_can_be_restored_by_every_later_job(tmp_path: Path) -> None:
    archived(tmp_path, StepId(FIRST.id, 1000), FIRST)
    archived(tmp_path, StepId(THIRD.id, 2000), THIRD)
    found = survey(tmp_path)
    assert found.conflict == ""
    assert [step.id.step for step in found.complete] == [1000, 2000]


@pytest.mark.parametrize("own", [(STRANGER,), (STRANGER, SECOND)], ids=["began", "went on"])
def test_two_runs_that_began_apart_still_are_a_conflict(
    tmp_path: Path, own: tuple[Epoch, ...]
) -> None:
    other = StepId(EpochId(4, "44444444"), 1)
    archived(tmp_path, other, Epoch(other.epoch))
    assert "shared by two runs" in survey(tmp_path, *own).conflict


def test_the_line_of_an_epoch_is_as_long_as_anybody_can_tell() -> None:
    assert ancestors_of([THIRD], [STRANGER, FIRST, SECOND]) == (FIRST, SECOND, THIRD)
    assert ancestors_of([THIRD], [FIRST]) == (THIRD,), "who is beyond a gap cannot be known"


def test_the_line_of_a_fork_ends_where_it_left_the_other_run() -> None:
    forked = Epoch(EpochId(2, "22222222"), StepId(FIRST.id, 7), "other")
    assert ancestors_of([forked], [FIRST]) == (forked,)
