"""Ranks that hold the same bytes: the archive has them once, and gives each its image back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.retention import Retention
from keepstep.core.shard import Shard
from keepstep.errors import DigestError, FormatError
from keepstep.image import PAGE_BYTES, ControlPage, Layout, TensorRole, TensorSpec
from keepstep.image.layout import CHUNK_BYTES
from keepstep.steps import TierAnswer, shard_name
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive import browse
from keepstep_sidecar.tiers.archive.step_record import (
    NAME,
    StepRecord,
    TwinDelta,
    twin_delta_name,
)
from keepstep_sidecar.tiers.archive.store import StoredObject
from keepstep_sidecar.tiers.archive.tier import ArchiveTier
from keepstep_sidecar.volume.run_tree import LocalShard
from keepstep_sidecar.volume.volume import Volume
from tests.archive.conftest import commit, running, send
from tests.tiers import reading
from tests.volume.images import EPOCH, RUN, Slot, empty_slot, step_id, write_noise

WORLD = 3
CHUNKS = 7


def replica(rank: int, step: int, *, world: int = WORLD, own: Iterable[int] = ()) -> Slot:
    """The image of a rank of a data-parallel run: chunks in the middle are those of all ranks, but
    for `own`; the extras are the rank's."""
    values = CHUNKS * CHUNK_BYTES // 4 - 100_000
    tensors = [TensorSpec("model.weight", "F32", (values,), TensorRole.PARAMS)]
    twins = [twin for twin in range(world) if twin != rank]
    extras = 5000 * (1 + rank)  # no two images are of one size
    layout = Layout.build(
        tensors, rank=rank, world=world, twins=twins, extras_capacity_bytes=extras
    )
    assert layout.chunk_count == CHUNKS
    view = empty_slot(layout)
    view[: len(layout.header)] = layout.header
    whose = {0: rank, CHUNKS - 1: rank} | dict.fromkeys(own, rank)
    for chunk in range(CHUNKS):
        begin = max(chunk * CHUNK_BYTES, len(layout.header))
        end = min((chunk + 1) * CHUNK_BYTES, layout.digests_begin)
        write_noise(view[begin:end], f"{step}/{chunk}/{whose.get(chunk)}")
    control = ControlPage(
        run=RUN,
        layout=layout.id,
        epoch=EPOCH,
        rank=rank,
        world=world,
        step=step,
        extras_bytes=100,
        staged_at=1.7e9 + step,
    )
    view[layout.control_begin :] = control.to_bytes()
    return Slot(view, layout, control)


def write_replicas(volume: Volume, step: int, **image: Any) -> dict[int, LocalShard]:
    for rank in range(WORLD):
        slot = replica(rank, step, **image)
        volume.write(slot.view, slot.layout, slot.control)
    return {shard.rank: shard for shard in volume.scan().shards if shard.step_id.step == step}


@pytest.fixture
def config(archive_dir: Path) -> ArchiveConfig:
    return ArchiveConfig(url=str(archive_dir), every=1)


@pytest.fixture
def step_dir(archive_dir: Path) -> Path:
    return archive_dir / RUN / str(step_id(10))


@asynccontextmanager
async def archived(
    local: Volume, config: ArchiveConfig, **image: Any
) -> AsyncIterator[tuple[ArchiveTier, dict[int, LocalShard]]]:
    """All ranks' images of step 10 are there, sent by one sidecar."""
    async with running(config) as remote_tier:
        shards = write_replicas(local, 10, **image)
        await send(remote_tier, shards, within_s=60)
        yield remote_tier, shards


async def brought(remote_tier: ArchiveTier, shards: dict[int, LocalShard]) -> None:
    """Every rank's image comes back as it was, whole and in single chunks."""
    held = await remote_tier.scan()
    assert held.answer is TierAnswer.STEPS, held.reason
    for remote in held.shards:
        original = shards[remote.rank].path.read_bytes()
        layout = (await reading.manifest(remote_tier, remote)).layout
        slot = empty_slot(layout)
        await reading.load(remote_tier, remote, slot)
        assert bytes(slot) == original, f"rank {remote.rank}"
        for chunk in (0, 3, CHUNKS - 1):
            begin = chunk * CHUNK_BYTES
            end = min(begin + CHUNK_BYTES, layout.digests_begin)
            piece = memoryview(bytearray(end - begin))
            await reading.chunks(remote_tier, remote, [(chunk, piece)])
            assert piece == original[begin:end]


async def test_chunks_that_ranks_have_in_common_are_stored_once(
    local: Volume, config: ArchiveConfig, step_dir: Path
) -> None:
    async with archived(local, config) as (remote_tier, shards):
        await brought(remote_tier, shards)
        assert remote_tier.status().sent == WORLD
    sizes = {path.name: path.stat().st_size for path in step_dir.iterdir()}
    whole = shards[0].size_bytes
    assert sizes.pop(shard_name(0, WORLD)) == whole
    assert sizes.pop(NAME) < PAGE_BYTES
    assert sizes == {twin_delta_name(rank, WORLD, 0): pytest.approx(2 * CHUNK_BYTES, rel=0.1)
                     for rank in (1, 2)}  # fmt: skip


async def test_a_chunk_that_differs_between_ranks_is_stored_for_each_rank(
    local: Volume, config: ArchiveConfig, step_dir: Path
) -> None:
    async with archived(local, config, own=[3]) as (remote_tier, shards):
        await brought(remote_tier, shards)
    assert (step_dir / twin_delta_name(1, WORLD, 0)).stat().st_size > 2.5 * CHUNK_BYTES


async def test_an_upload_waits_for_the_replica_on_another_machine(
    volumes: Any, config: ArchiveConfig, step_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = volumes("here"), volumes("there")
    async with running(config) as later, running(config) as first:
        store = later._sender.store
        asked, find = asyncio.Event(), store.find_object

        async def seen(name: str) -> StoredObject | None:
            if name.endswith(shard_name(0, WORLD)):
                asked.set()
            return await find(name)

        monkeypatch.setattr(store, "find_object", seen)
        shards = write_replicas(here, 10)
        commit(later, {rank: shards[rank] for rank in (1, 2)})
        await asyncio.wait_for(asked.wait(), 20)
        assert not step_dir.exists() or not list(step_dir.iterdir())
        shards[0] = write_replicas(there, 10)[0]
        commit(first, {0: shards[0]})
        assert await later.drain(timeout_s=30)
        await brought(later, shards)
    assert (step_dir / twin_delta_name(2, WORLD, 0)).exists()


async def test_a_replica_that_is_never_uploaded_does_not_block_other_ranks(
    local: Volume, config: ArchiveConfig, step_dir: Path
) -> None:
    async with running(config, patience_s=-10.0) as remote_tier:
        shards = write_replicas(local, 10)
        commit(remote_tier, {rank: shards[rank] for rank in (1, 2)})
        assert await remote_tier.drain(timeout_s=20, whole=False)
    assert {path.name for path in step_dir.iterdir()} == {shard_name(r, WORLD) for r in (1, 2)}


async def test_a_pod_that_shuts_down_uploads_its_complete_shard_instead_of_waiting_for_a_replica(
    local: Volume, config: ArchiveConfig, step_dir: Path
) -> None:
    async with running(config, patience_s=1000.0) as remote_tier:
        shards = write_replicas(local, 10)
        commit(remote_tier, {1: shards[1]})
        assert await remote_tier.drain(timeout_s=30, whole=False)
    assert (step_dir / shard_name(1, WORLD)).stat().st_size == shards[1].size_bytes


async def test_a_flipped_bit_in_a_shared_chunk_is_detected_by_every_rank_that_needs_it(
    local: Volume, config: ArchiveConfig, step_dir: Path
) -> None:
    async with archived(local, config) as (remote_tier, _):
        base = step_dir / shard_name(0, WORLD)
        data = bytearray(base.read_bytes())
        data[3 * CHUNK_BYTES + 5] ^= 1
        base.write_bytes(data)
        for remote in (await remote_tier.scan()).shards:
            slot = empty_slot((await reading.manifest(remote_tier, remote)).layout)
            with pytest.raises(DigestError, match="chunk 3"):
                await reading.load(remote_tier, remote, slot)
            assert bytes(slot[-PAGE_BYTES:]) == bytes(PAGE_BYTES), "and leaves no seal"


@pytest.mark.parametrize("which", [shard_name(0, WORLD), twin_delta_name(1, WORLD, 0)])
async def test_a_file_that_is_missing_or_cut_off_makes_the_step_unusable(
    local: Volume, config: ArchiveConfig, step_dir: Path, which: str
) -> None:
    async with archived(local, config):
        pass
    file = step_dir / which
    file.write_bytes(file.read_bytes()[:-PAGE_BYTES])
    async with running(config) as remote_tier:
        held = await remote_tier.scan()
        assert held.answer is TierAnswer.UNKNOWN
        assert f"{which} has " in held.reason
        file.unlink()
        held = await remote_tier.scan()
        assert held.answer is TierAnswer.UNKNOWN
        assert f"{which} is missing" in held.reason


async def test_a_pull_expands_deduplicated_shards_to_complete_files(
    local: Volume, config: ArchiveConfig, step_dir: Path, tmp_path: Path
) -> None:
    async with archived(local, config) as (_, shards):
        pass
    async with browse.open_archived_run(config, RUN) as holding:
        (step,) = await holding.chosen("10", sound=True)
        assert await holding.verify(step, on_chunk=lambda size: None) == []
        pulled = await browse.pull_step(holding, step, tmp_path / "pulled", on_chunk=lambda n: None)
    for rank, shard in shards.items():
        assert (pulled / shard_name(rank, WORLD)).read_bytes() == shard.path.read_bytes()


async def test_a_retired_step_is_deleted_with_its_deduplicated_files(
    local: Volume, archive_dir: Path, step_dir: Path
) -> None:
    config = ArchiveConfig(url=str(archive_dir), every=1, retention=Retention(last=1))
    async with running(config) as remote_tier:
        for step in (10, 20):
            await send(remote_tier, write_replicas(local, step), within_s=20)
        await remote_tier.delete_expired()
    assert not step_dir.exists() or list(step_dir.iterdir()) == []


# --- the record ----------------------------------------------------------------------------------


def record(twins: dict[int, TwinDelta]) -> StepRecord:
    sealed = step_id(10)
    shards = tuple(
        Shard(step_id=sealed, rank=rank, world=WORLD, size_bytes=1000, root=f"{rank:032x}")
        for rank in range(WORLD)
    )
    return StepRecord(
        run=RUN,
        id=sealed,
        world=WORLD,
        epochs=(EPOCH,),
        shards=shards,
        written_at=1.7e9,
        twins=twins,
    )


def test_a_step_record_with_deduplicated_shards_survives_a_json_round_trip() -> None:
    written = record(
        {1: TwinDelta(rank=0, stored_bytes=500), 2: TwinDelta(rank=0, stored_bytes=400)}
    )
    data = written.to_json()
    assert StepRecord.from_json(data, path="there") == written
    assert written.files == {
        shard_name(0, WORLD): 1000,
        twin_delta_name(1, WORLD, 0): 500,
        twin_delta_name(2, WORLD, 0): 400,
    }  # fmt: skip


@pytest.mark.parametrize("of", [{1: 1}, {1: WORLD}, {1: 0, 0: 2}, {1: 2, 2: 1}], ids=str)
def test_a_deduplicated_shard_that_refers_to_an_incomplete_file_is_refused(
    of: dict[int, int],
) -> None:
    twins = {rank: TwinDelta(rank=whose, stored_bytes=1) for rank, whose in of.items()}
    with pytest.raises(FormatError, match="has no whole file"):
        StepRecord.from_json(record(twins).to_json(), path="there")
