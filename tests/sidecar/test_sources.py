"""A trainer at another world size reads images of ranks that it is not: mapped, or in chunks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer import FakeTrainer, content, read_image

from keepstep.core.shard import NOBODY, Ranks, Shard
from keepstep.errors import SidecarError, StorageError
from keepstep.image import Layout
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.trainer import (
    Chunk,
    Chunks,
    ChunksRequest,
    HeadersRequest,
    Sources,
    SourcesRequest,
    Window,
    WindowRequest,
)
from keepstep_sidecar.commit.inventory import Copies, LocalShards
from keepstep_sidecar.restore.sources import ImageSources
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]

SIZE = 20 << 20
"""Three chunks, of which the last one is short."""


def saved(sidecar: SidecarProcess, trainers: Trainers, *, size: int = 64 << 10) -> StepId:
    """Two ranks have committed step 4 and died."""
    ranks = [trainers(sidecar.socket, rank, 2, size=size).begin_run() for rank in range(2)]
    id = StepId(ranks[0].epoch.id, 4)
    assert [one.stage(4) for one in ranks] == [id, id]
    for one in ranks:
        assert one.wait(id, "committed", flush=True).reached
        one.disconnect()
    return id


def alone(sidecar: SidecarProcess, trainers: Trainers) -> FakeTrainer:
    """The only rank of a smaller world, or one that was not there before."""
    trainer = trainers(sidecar.socket, 5, 6)
    trainer.connect()
    trainer.candidates()  # answers when the volumes are scanned
    return trainer


def sources(trainer: FakeTrainer, id: StepId) -> Sources:
    return trainer.call("/v1/sources", SourcesRequest(lease=trainer.lease, id=id), Sources)


def window(trainer: FakeTrainer, frames: int = 4) -> Window:
    return trainer.call("/v1/window", WindowRequest(lease=trainer.lease, frames=frames), Window)


def bring(trainer: FakeTrainer, id: StepId, *chunks: Chunk) -> Chunks:
    request = ChunksRequest(lease=trainer.lease, id=id, chunks=chunks)
    return trainer.call("/v1/chunks", request, Chunks)


def frame(seen: Window, number: int, size: int) -> bytes:
    with open(seen.path, "rb") as file:
        file.seek(number * seen.frame_bytes)
        return file.read(size)


def pinned(sidecar: SidecarProcess) -> list[str]:
    ranks = sidecar.get("/v1/status")["ranks"]
    return [slot["slot"] for rank in ranks for slot in rank["slots"] if slot["pinned"]]


def windows(sidecar: SidecarProcess) -> list[Path]:
    return list(sidecar.memory.glob("window-*"))


# --- what is offered ---------------------------------------------------------------------------


# --- mapped ------------------------------------------------------------------------------------


def test_a_mapped_image_stays_until_its_reader_has_restored(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    id = saved(sidecar, trainers)
    reader = alone(sidecar, trainers)
    path = sources(reader, id).sources[0].path
    other = trainers(sidecar.socket, 0, 2)
    other.connect()
    other.restored(Epoch(EpochId(2, "00000002"), id))
    other.register()
    for step in range(5, 12):
        other.stage(step)
    assert read_image(other.layout, path) == content(other.layout, 4)
    assert pinned(sidecar)
    reader.restored(other.epoch)
    eventually(lambda: not pinned(sidecar), what="what was mapped may be overwritten")


def test_memory_of_ranks_that_a_smaller_world_lacks_is_freed_after_its_first_step(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    id = saved(sidecar, trainers)
    alone = trainers(sidecar.socket, 0, 1)
    alone.connect()
    alone.restored(Epoch(EpochId(2, "00000002"), id))
    alone.register()
    assert list((sidecar.memory / "rank-00001").iterdir())
    newer = alone.stage(5)
    eventually(
        lambda: not list((sidecar.memory / "rank-00001").iterdir()), what="rank 1's slots are freed"
    )
    assert alone.wait(newer, "committed", flush=True).reached


def test_a_reader_that_dies_keeps_nothing(sidecar: SidecarProcess, trainers: Trainers) -> None:
    id = saved(sidecar, trainers)
    reader = alone(sidecar, trainers)
    sources(reader, id)
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
    id = saved(sidecar, trainers, size=SIZE)
    sidecar.kill()
    shutil.rmtree(sidecar.memory)
    sidecar.memory.mkdir()
    # with room for a window, but not for an image
    return sidecar.start("--memory-limit", str(18 << 20)), id


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ((Chunk(rank=0, chunk=3, frame=0),), "chunks 0 to 2"),
        ((Chunk(rank=0, chunk=-1, frame=0),), "chunks 0 to 2"),
        ((Chunk(rank=0, chunk=0, frame=9),), "of 0 to 1"),
        ((Chunk(rank=0, chunk=0, frame=0), Chunk(rank=0, chunk=1, frame=0)), "a frame of its own"),
    ],
)
def test_a_request_for_what_is_not_there_is_refused(
    on_volumes: tuple[SidecarProcess, StepId],
    trainers: Trainers,
    chunks: tuple[Chunk, ...],
    text: str,
) -> None:
    sidecar, id = on_volumes
    reader = alone(sidecar, trainers)
    window(reader)
    with pytest.raises(SidecarError, match=text) as error:
        bring(reader, id, *chunks)
    assert error.value.code == "bad-request"


def test_a_window_that_does_not_fit_into_the_memory_limit_is_refused(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--memory-limit", str(15 << 20))
    with pytest.raises(SidecarError, match="raise --memory-limit") as error:
        window(alone(sidecar, trainers))
    assert error.value.code == "no-memory"
    assert not windows(sidecar)


# --- many nodes, each with the same replica ---------------------------------------------------


class Node:
    """The sources of a node that has nothing itself: 32 ranks saved the step, four a node; their
    shards lie with peers. `read`: of which a page and a header were."""

    def __init__(self, *, twins: bool = True, damaged: Collection[int] = ()) -> None:
        self.read: list[int] = []
        self.id = StepId(EpochId(1, "aaaaaaaa"), 4)
        self._damaged = damaged
        shards = [
            Shard(
                step_id=self.id,
                rank=rank,
                world=32,
                alike=Ranks.of(range(rank % 4, 32, 4)) if twins else NOBODY,
            )
            for rank in range(32)
        ]
        at = {one.rank: [SimpleNamespace(tier=Tier.PEER, shard=one)] for one in shards}
        remotes = SimpleNamespace(of=lambda id: at, looked=True, index=0)
        pool = SimpleNamespace(ranks={}, images=lambda id: {}, find=lambda rank, id: None)
        committer = SimpleNamespace(
            local_shards=SimpleNamespace(scanned=True),
            copies=Copies(LocalShards(None, None), pool, remotes),  # type: ignore[arg-type]
            feed=lambda event: None,
        )
        leases = SimpleNamespace(
            require=lambda lease: SimpleNamespace(rank=int(lease)), ranks=range(8, 12)
        )
        self.sources = ImageSources(pool, committer, leases, self)  # type: ignore[arg-type]

    manifest = None

    async def ask(self, id: StepId, saved: int, question: object) -> tuple[Any, Any]:
        self.read.append(saved)
        if saved in self._damaged:
            raise StorageError("damaged")
        layout = Layout.build([], rank=saved, world=32)
        control = SimpleNamespace(extras_bytes=0)
        source = self.sources._copies.origins(id, saved)[0]
        return source, SimpleNamespace(layout=layout, control=control)

    async def told(self, rank: int, *, every: bool = False) -> Sources:
        request = SourcesRequest(lease=str(rank), id=self.id, every=every)
        return await self.sources.sources(request)


async def test_of_twins_a_node_reads_one_and_the_image_of_each_of_its_ranks() -> None:
    node = Node()
    told = await node.told(8)
    assert [one.rank for one in told.sources] == [8, 9, 10, 11]
    assert (await node.told(11)).sources == told.sources
    assert told.left_out == tuple({*range(32)} - {8, 9, 10, 11})
    assert [one.rank for one in (await node.told(17)).sources] == [8, 9, 10, 11, 17]


async def test_what_ranks_of_a_node_ask_for_is_read_once_for_all_of_them() -> None:
    node = Node(twins=False)
    told = await asyncio.gather(*(node.told(rank) for rank in range(8, 12)))
    assert all(len(one.sources) == 32 and not one.left_out for one in told)
    request = HeadersRequest(lease="8", id=node.id, ranks=tuple(range(32)))
    assert len((await node.sources.headers(request)).headers) == 32
    assert sorted(node.read) == list(range(32))


async def test_where_a_copy_is_damaged_its_twin_is_named() -> None:
    node = Node(damaged=[8])
    told = await node.told(9)
    assert [one.rank for one in told.sources] == [9, 10, 11, 12]
    assert node.read.count(8) == 1
