"""Wherever a shard lies, it is read in one way: a drive, a pod, a kept copy, a directory, S3."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from keepstep.errors import ImageError, StorageError
from keepstep.image import PAGE_BYTES, ControlPage
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.remote_tier import RemoteTier
from keepstep_sidecar.tiers.source import ReadCancellation, ShardSource, local_source
from keepstep_sidecar.volume.volume import VolumeSet
from tests.archive.conftest import commit, write_step
from tests.archive.conftest import running as archiving
from tests.harness import flip, until, verify_image
from tests.peer.nodes import BIG, running, same
from tests.tiers.local import durable
from tests.volume.images import CHUNK, RUN, Slot, empty_slot, make_layout, staged

STEP = 5
T = TypeVar("T")


async def read(source: ShardSource, work: Callable[[verified_chunks.OpenSource], T]) -> T:
    """`work` with the source open, as a restore does it."""

    def opened(cancel: ReadCancellation) -> T:
        with verified_chunks.open_verified(source, cancel) as found:
            return work(found)

    return await verified_chunks.run_cancellable(None, opened)


async def load(source: ShardSource, view: memoryview) -> ControlPage:
    return await verified_chunks.run_cancellable(
        None, lambda cancel: verified_chunks.load_image(source, view, cancel=cancel)
    )


@dataclass(frozen=True)
class Lying:
    """A shard of rank 0 of two, in one place. `path`: its bytes there."""

    source: ShardSource
    path: Path
    slot: Slot


Place = Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[Lying]]


def _slot() -> Slot:
    return staged(make_layout(rank=0, world=2, parameters=BIG), STEP)


async def _seen(remote_tier: RemoteTier) -> ShardSource:
    shards = (await remote_tier.scan()).shards
    (source,) = remote_tier.sources(next(shard for shard in shards if shard.rank == 0))
    return source


@asynccontextmanager
async def on_a_drive(request: pytest.FixtureRequest) -> AsyncIterator[Lying]:
    volume = request.getfixturevalue("local")
    found = write_step(volume, STEP, parameters=BIG)[0]
    yield Lying(local_source(VolumeSet([volume]), found), found.path, _slot())


@asynccontextmanager
async def on_another_pod(request: pytest.FixtureRequest) -> AsyncIterator[Lying]:
    node = request.getfixturevalue("node")
    here, other = node(0), node(1)
    here.knows(other)
    async with running(here, other):
        slot, found = other.write(STEP, rank=0, parameters=BIG)
        yield Lying(await _seen(here.remote_tier), found.path, slot)


@asynccontextmanager
async def kept_for_another_pod(request: pytest.FixtureRequest) -> AsyncIterator[Lying]:
    node = request.getfixturevalue("node")
    owner, here = node(0), node(1)
    owner.knows(here, buddies=(here,))
    async with running(owner, here):
        slot, found = owner.write(STEP, rank=0, parameters=BIG)
        durable(owner.remote_tier, found)
        await until(lambda: here.copies() == [(STEP, 0)])
        yield Lying(await _seen(here.remote_tier), here.copy_path(found.step_id), slot)


@asynccontextmanager
async def _archived(
    request: pytest.FixtureRequest, config: ArchiveConfig, root: Path
) -> AsyncIterator[Lying]:
    shards = write_step(request.getfixturevalue("local"), STEP, parameters=BIG)
    async with archiving(config) as remote_tier:
        commit(remote_tier, shards)
        assert await remote_tier.drain(timeout_s=60)
        (path,) = root.rglob("rank-00000-*.safetensors")
        yield Lying(await _seen(remote_tier), path, _slot())


def in_a_directory(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Lying]:
    root = request.getfixturevalue("archive_dir")
    return _archived(request, ArchiveConfig(url=str(root), every=1), root)


def in_s3(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Lying]:
    bucket = request.getfixturevalue("bucket")
    return _archived(request, bucket.config(), bucket.directory)


PLACES = [on_a_drive, on_another_pod, kept_for_another_pod, in_a_directory, in_s3]
everywhere = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


@everywhere
async def test_a_source_returns_its_identity_header_and_seal(
    place: Place, request: pytest.FixtureRequest
) -> None:
    async with place(request) as lying:
        source, slot = lying.source, lying.slot
        shard = source.shard
        assert (shard.step_id, shard.rank, shard.world) == (slot.id, 0, 2)
        assert (shard.size_bytes, shard.alike) == (
            slot.layout.size_bytes,
            slot.layout.identical_ranks,
        )
        manifest = await read(source, lambda opened: opened.manifest)
        assert manifest.layout == slot.layout
        assert manifest.shard.root == shard.root
        control = manifest.control
        assert (control.run, control.step_id, control.rank) == (RUN, slot.id, 0)
        assert control.root is not None


@everywhere
async def test_a_source_loads_the_complete_image_verified_and_sealed(
    place: Place, request: pytest.FixtureRequest
) -> None:
    async with place(request) as lying:
        view = empty_slot(lying.slot.layout)
        control = await load(lying.source, view)
        assert same(view, lying.slot)
        assert verify_image(view, lying.slot.layout, run=RUN, step_id=lying.slot.id) == control


@everywhere
async def test_chunks_of_a_source_can_be_read_in_any_order(
    place: Place, request: pytest.FixtureRequest
) -> None:
    async with place(request) as lying:
        layout = lying.slot.layout
        last = layout.chunk_count - 1
        sizes = {last: layout.digests_begin - last * CHUNK, 1: CHUNK}
        expected = [(index, empty_buffer(size)) for index, size in sizes.items()]
        await read(lying.source, lambda opened: verified_chunks.fill_buffers(opened, expected))
        for index, buffer in expected:
            begin = index * CHUNK
            assert buffer == lying.slot.view[begin : begin + sizes[index]]


def empty_buffer(size: int) -> memoryview:
    """Page aligned, as a drive wants it."""
    return empty_slot(make_layout(parameters=BIG))[:size]


@everywhere
async def test_a_flipped_byte_is_detected_and_leaves_the_slot_unsealed(
    place: Place, request: pytest.FixtureRequest
) -> None:
    async with place(request) as lying:
        flip(lying.path, CHUNK + 5)
        view = empty_slot(lying.slot.layout)
        with pytest.raises((ImageError, StorageError)):
            await load(lying.source, view)
        assert bytes(view[-PAGE_BYTES:]) == bytes(PAGE_BYTES)


@everywhere
async def test_a_flipped_byte_is_found_in_its_chunk(
    place: Place, request: pytest.FixtureRequest
) -> None:
    async with place(request) as lying:
        flip(lying.path, CHUNK + 5)
        expected = [(1, empty_buffer(CHUNK))]
        with pytest.raises((ImageError, StorageError)):
            await read(lying.source, lambda opened: verified_chunks.fill_buffers(opened, expected))


@everywhere
async def test_a_deleted_source_raises_an_error_and_leaves_the_slot_unsealed(
    place: Place, request: pytest.FixtureRequest
) -> None:
    async with place(request) as lying:
        lying.path.unlink()
        view = empty_slot(lying.slot.layout)
        with pytest.raises((ImageError, StorageError)):
            await load(lying.source, view)
        assert bytes(view[-PAGE_BYTES:]) == bytes(PAGE_BYTES)
