"""What is beyond this machine, reached as if it were here: with a real archive in a directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer import FakeTrainer, content, make_layout, read_image

from keepstep.errors import SidecarError
from keepstep.steps import StepId, Tier, TierAnswer
from keepstep.wire.trainer import (
    ChunkBufferRequest,
    ChunkReadRequest,
    ChunksReady,
    ChunksRequest,
    SharedChunkBuffer,
)
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]


@pytest.fixture
def archived(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, archive: Path
) -> tuple[SidecarProcess, StepId]:
    """A sidecar, ended, of which step 4 of two ranks is on its volume and in the archive."""
    sidecar = sidecars().start("--archive", str(archive), "--archive-every", "1")
    ranks = [trainers(sidecar.socket, rank, 2).begin_run() for rank in range(2)]
    step_id = StepId(ranks[0].epoch.id, 4)
    assert [rank.stage(4) for rank in ranks] == [step_id, step_id]
    for rank in ranks:
        waited = rank.wait(step_id, "archived", flush=True)
        assert waited.reached, waited.reason
        rank.disconnect()
    sidecar.kill()
    # a start elsewhere watches for 25 s whether a run still trains that did so for a second
    shutil.rmtree(archive / sidecar.run / "lives", ignore_errors=True)
    return sidecar, step_id


def lose(sidecar: SidecarProcess, *, volume: bool) -> None:
    shutil.rmtree(sidecar.memory)
    sidecar.memory.mkdir()
    if volume:
        shutil.rmtree(sidecar.volume)


def damage(sidecar: SidecarProcess, rank: int) -> Path:
    path = next(sidecar.root.glob(f"0*/rank-{rank:05d}-*"))
    with path.open("r+b") as file:
        file.seek(len(make_layout(rank, 2).header) + 77)
        file.write(b"?")
    return path


def come(sidecar: SidecarProcess, trainers: Trainers, rank: int, world: int = 2) -> FakeTrainer:
    trainer = trainers(sidecar.socket, rank, world)
    trainer.connect()
    return trainer


def test_waiting_for_a_step_that_never_reached_the_archive_fails(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, archive: Path
) -> None:
    """Two steps that are committed and not due: one rots on its drive, one is retired."""
    sidecar = sidecars().start("--archive", str(archive), "--archive-every", "1000")
    trainer = trainers(sidecar.socket).begin_run()
    rotten = trainer.stage(1)
    assert trainer.wait(rotten, "committed", flush=True).reached
    damage(sidecar, 0)
    waited = trainer.wait(rotten, "archived")
    assert (waited.reached, waited.final) == (False, True)
    assert "not in the archive" in waited.reason
    for step in (2, 3, 4, 5):
        assert trainer.wait(trainer.stage(step), "committed", flush=True).reached
    eventually(lambda: 2 not in sidecar.published())
    assert not trainer.wait(StepId(rotten.epoch, 2), "archived").reached
    assert trainer.wait(StepId(rotten.epoch, 5), "archived").reached
    assert [path.parent.name for path in archive.rglob("step.json")] == [
        str(StepId(rotten.epoch, 5))
    ]


def test_a_damaged_local_shard_is_replaced_by_the_archived_one(
    archived: tuple[SidecarProcess, StepId], trainers: Trainers, archive: Path
) -> None:
    sidecar, step_id = archived
    lose(sidecar, volume=False)
    path = damage(sidecar, 1)
    sidecar.start("--archive", str(archive), "--archive-every", "1")
    eventually(lambda: '"tier": "archive"' in sidecar.text(), what="the next tier is read")
    assert not path.exists()
    tiers = []
    for rank in range(2):
        opened = come(sidecar, trainers, rank).open(step_id)
        tiers.append(opened.tier)
        assert read_image(make_layout(rank, 2), opened.path) == content(make_layout(rank, 2), 4)
    # the step is hidden as it loses a shard, perhaps just where the other one is opened
    assert tiers[0] in (Tier.LOCAL, Tier.ARCHIVE)
    assert tiers[1] is Tier.ARCHIVE


def test_a_locally_damaged_chunk_is_read_from_the_archive(
    archived: tuple[SidecarProcess, StepId], trainers: Trainers, archive: Path
) -> None:
    sidecar, step_id = archived
    sidecar.start("--archive", str(archive), "--archive-every", "1")
    eventually(lambda: sidecar.get("/v1/status")["watermarks"].get("archive"), what="a look there")
    path = damage(sidecar, 1)
    reader = come(sidecar, trainers, 2, 3)
    layout = make_layout(1, 2)
    shown = reader.call(
        "/v1/window", ChunkBufferRequest(lease=reader.lease, frames=2), SharedChunkBuffer
    )
    request = ChunksRequest(
        lease=reader.lease, id=step_id, chunks=(ChunkReadRequest(rank=1, chunk=0, frame=1),)
    )
    assert reader.call("/v1/chunks", request, ChunksReady).tier is Tier.ARCHIVE
    assert not path.exists(), "what is damaged is put aside"
    with open(shown.path, "rb") as file:
        file.seek(shown.frame_bytes + len(layout.header))
        assert file.read(len(content(layout, 4))) == content(layout, 4)


def test_an_unreachable_archive_does_not_make_a_run_start_over(
    archived: tuple[SidecarProcess, StepId], trainers: Trainers, archive: Path
) -> None:
    sidecar, _ = archived
    lose(sidecar, volume=True)
    away = archive.rename(archive.with_name("not-mounted"))
    sidecar.start("--archive", str(archive), "--archive-every", "1")
    trainer = come(sidecar, trainers, 0)
    found = trainer.candidates()
    assert (found.answer, found.candidates) == (TierAnswer.UNKNOWN, ())
    assert str(archive) in found.reason
    away.rename(archive)
    eventually(lambda: trainer.candidates().candidates, what="the archive is back")


def test_an_archived_copy_that_is_damaged_is_not_offered_again(
    archived: tuple[SidecarProcess, StepId], trainers: Trainers, archive: Path
) -> None:
    sidecar, step_id = archived
    lose(sidecar, volume=True)
    for path in archive.rglob("rank-00001-*"):
        if path.stat().st_size > 60_000:
            with path.open("r+b") as file:
                file.seek(len(make_layout(1, 2).header) + 77)
                file.write(b"?")
    sidecar.start("--archive", str(archive), "--archive-every", "1")
    trainer = come(sidecar, trainers, 1)
    trainer.candidates()  # answers when the archive was looked at
    with pytest.raises(SidecarError):
        trainer.open(step_id)
    assert trainer.candidates().candidates == ()
