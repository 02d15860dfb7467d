"""A trainer at another world size reads images of ranks that it is not: mapped, or in chunks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer import FakeTrainer, content, read_image

from keepstep.errors import SidecarError
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.trainer import (
    ChunkBufferRequest,
    ChunkReadRequest,
    ChunksReady,
    ChunksRequest,
    SharedChunkBuffer,
    Sources,
    SourcesRequest,
)
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]

SIZE = 20 << 20
"""Three chunks, of which the last one is short."""


def saved(sidecar: SidecarProcess, trainers: Trainers, *, size: int = 64 << 10) -> StepId:
    """Two ranks have committed step 4 and died."""
    ranks = [trainers(sidecar.socket, rank, 2, size=size).begin_run() for rank in range(2)]
    step_id = StepId(ranks[0].epoch.id, 4)
    assert [rank.stage(4) for rank in ranks] == [step_id, step_id]
    for rank in ranks:
        assert rank.wait(step_id, "committed", flush=True).reached
        rank.disconnect()
    return step_id


def alone(sidecar: SidecarProcess, trainers: Trainers) -> FakeTrainer:
    """The only rank of a smaller world, or one that was not there before."""
    trainer = trainers(sidecar.socket, 5, 6)
    trainer.connect()
    trainer.candidates()  # answers when the volumes are scanned
    return trainer


def sources(trainer: FakeTrainer, step_id: StepId) -> Sources:
    return trainer.call("/v1/sources", SourcesRequest(lease=trainer.lease, id=step_id), Sources)


def window(trainer: FakeTrainer, frames: int = 4) -> SharedChunkBuffer:
    return trainer.call(
        "/v1/window", ChunkBufferRequest(lease=trainer.lease, frames=frames), SharedChunkBuffer
    )


def bring(trainer: FakeTrainer, step_id: StepId, *chunks: ChunkReadRequest) -> ChunksReady:
    request = ChunksRequest(lease=trainer.lease, id=step_id, chunks=chunks)
    return trainer.call("/v1/chunks", request, ChunksReady)


def frame(seen: SharedChunkBuffer, number: int, size: int) -> bytes:
    with open(seen.path, "rb") as file:
        file.seek(number * seen.frame_bytes)
        return file.read(size)


def pinned(sidecar: SidecarProcess) -> list[str]:
    ranks = sidecar.get("/v1/status")["ranks"]
    return [slot["slot"] for rank in ranks for slot in rank["slots"] if slot["pinned"]]


def windows(sidecar: SidecarProcess) -> list[Path]:
    return list(sidecar.memory.glob("window-*"))


# --- mapped ------------------------------------------------------------------------------------


def test_a_mapped_image_is_kept_until_its_reader_has_restored_it(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    step_id = saved(sidecar, trainers)
    reader = alone(sidecar, trainers)
    path = sources(reader, step_id).sources[0].path
    other = trainers(sidecar.socket, 0, 2)
    other.connect()
    other.restored(Epoch(EpochId(2, "00000002"), step_id))
    other.register()
    for step in range(5, 12):
        other.stage(step)
    assert read_image(other.layout, path) == content(other.layout, 4)
    assert pinned(sidecar)
    reader.restored(other.epoch)
    eventually(lambda: not pinned(sidecar), what="what was mapped may be overwritten")


def test_memory_of_ranks_missing_in_a_smaller_world_is_freed_after_the_first_step(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    step_id = saved(sidecar, trainers)
    alone = trainers(sidecar.socket, 0, 1)
    alone.connect()
    alone.restored(Epoch(EpochId(2, "00000002"), step_id))
    alone.register()
    assert list((sidecar.memory / "rank-00001").iterdir())
    newer = alone.stage(5)
    eventually(
        lambda: not list((sidecar.memory / "rank-00001").iterdir()), what="rank 1's slots are freed"
    )
    assert alone.wait(newer, "committed", flush=True).reached


def test_a_reader_that_dies_holds_no_slot_or_file(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    step_id = saved(sidecar, trainers)
    reader = alone(sidecar, trainers)
    sources(reader, step_id)
    window(reader)
    assert len(windows(sidecar)) == 1
    reader.disconnect()
    eventually(lambda: not windows(sidecar), what="the window is removed")
    assert not pinned(sidecar)


# --- chunks ------------------------------------------------------------------------------------


@pytest.fixture
def on_volumes(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> tuple[SidecarProcess, StepId]:
    """A step of two ranks that is on the volume only: nothing may be fetched ahead of time."""
    sidecar = sidecars().start("--slots", "2")
    step_id = saved(sidecar, trainers, size=SIZE)
    sidecar.kill()
    shutil.rmtree(sidecar.memory)
    sidecar.memory.mkdir()
    # with room for a window, but not for an image
    return sidecar.start("--memory-limit", str(18 << 20)), step_id


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ((ChunkReadRequest(rank=0, chunk=3, frame=0),), "chunks 0 to 2"),
        ((ChunkReadRequest(rank=0, chunk=-1, frame=0),), "chunks 0 to 2"),
        ((ChunkReadRequest(rank=0, chunk=0, frame=9),), "of 0 to 1"),
        (
            (
                ChunkReadRequest(rank=0, chunk=0, frame=0),
                ChunkReadRequest(rank=0, chunk=1, frame=0),
            ),
            "a frame of its own",
        ),
    ],
)
def test_a_request_for_chunks_that_do_not_exist_is_refused(
    on_volumes: tuple[SidecarProcess, StepId],
    trainers: Trainers,
    chunks: tuple[ChunkReadRequest, ...],
    text: str,
) -> None:
    sidecar, step_id = on_volumes
    reader = alone(sidecar, trainers)
    window(reader)
    with pytest.raises(SidecarError, match=text) as error:
        bring(reader, step_id, *chunks)
    assert error.value.code == "bad-request"


def test_a_window_that_does_not_fit_into_the_memory_limit_is_refused(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--memory-limit", str(15 << 20))
    with pytest.raises(SidecarError, match="raise --memory-limit") as error:
        window(alone(sidecar, trainers))
    assert error.value.code == "no-memory"
    assert not windows(sidecar)
