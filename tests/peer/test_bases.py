"""A base goes to a buddy once, lies beside all copies that refer to it, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.errors import ForeignError, FormatError, ImageError
from keepstep.image import BaseRef, Layout, TensorRole, TensorSpec
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.incoming_copy import IncomingCopy
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.tiers.peer.protocol import CopiesToKeep, PodShardListing
from keepstep_sidecar.tiers.source import local_source
from keepstep_sidecar.volume.files import aligned_buffer
from keepstep_sidecar.volume.run_tree import LocalShard, ShardName
from keepstep_sidecar.volume.volume import SealedMemoryImage, Volume
from tests.harness import inodes, matching, until
from tests.peer.nodes import Node, running
from tests.tiers.local import committed, durable
from tests.volume.images import RUN, empty_slot, make_layout, staged, step_id

Pair = tuple[Node, Node]


def base_of(seed: int = 0, *, rank: int = 0, first: int | None = None) -> SealedMemoryImage:
    """`first`: the step that refers to it first."""
    tensors = [TensorSpec("model.frozen", "F32", (3_000_000,), TensorRole.PARAMS)]
    layout = Layout.build(tensors, rank=rank, world=2, is_base=True)
    slot = staged(layout, seed, seed=seed)
    step = seed if first is None else first
    slot.view[layout.control_begin :] = (
        control := replace(slot.control, extras_bytes=0, step=step)
    ).to_bytes()
    return SealedMemoryImage(view=slot.view, layout=layout, control=control)


def write(volume: Volume, step: int, base: SealedMemoryImage) -> LocalShard:
    slot = staged(make_layout(), step)
    control = replace(slot.control, base=BaseRef.of(base.control, base.layout))
    return volume.write(slot.view, slot.layout, control, base=base).shard


def bases(node: Node) -> dict[int, int]:
    """The inode of the base of each copy, by step."""
    found = matching(node.root, "peers/*/base-*")
    return {int(path.parent.name[-9:]): inode for path, inode in inodes(found).items()}


async def test_a_base_is_sent_to_a_peer_once_and_deleted_with_the_last_copy(pair: Pair) -> None:
    here, buddy = pair
    first, second = base_of(), base_of(1)
    async with running(here, buddy):
        for step in range(3):
            durable(here.remote_tier, write(here.volume, step, first))
            await until(lambda step=step: (step, 0) in buddy.copies())
        assert len(set(bases(buddy).values())) == 1
        sent = here.remote_tier.status().sent_bytes
        assert sent < 1.05 * first.layout.size_bytes
        durable(here.remote_tier, write(here.volume, 3, second))
        committed(here.remote_tier, step_id(3))
        await until(lambda: buddy.copies() == [(3, 0)])
        await until(lambda: bases(buddy).keys() == {3})
        assert here.remote_tier.status().sent_bytes > 1.9 * first.layout.size_bytes


async def test_a_base_with_the_same_bytes_but_another_first_step_is_sent(pair: Pair) -> None:
    here, buddy = pair
    async with running(here, buddy):
        for step in range(2):
            durable(here.remote_tier, write(here.volume, step, base_of(first=step)))
            await until(lambda step=step: (step, 0) in buddy.copies())
        assert len(set(bases(buddy).values())) == 2


async def test_a_base_other_than_the_one_its_shard_refers_to_is_refused(pair: Pair) -> None:
    here, _ = pair
    async with running(*pair):
        shards = [write(here.volume, step, base_of(step)) for step in range(2)]
        good, other = (local_source(here.volumes, shard) for shard in shards)
        with verified_chunks.open_verified(good):
            pass
        with (
            pytest.raises(ForeignError, match="it refers to another base than"),
            verified_chunks.open_verified(replace(good, beside=other.beside)),
        ):
            pass


async def test_another_pod_reads_shard_and_base_from_the_copy(pair: Pair) -> None:
    here, buddy = pair
    base = base_of()
    async with running(here, buddy):
        durable(here.remote_tier, write(here.volume, 1, base))
        await until(lambda: buddy.copies() == [(1, 0)])
        buddy.knows(here)
        for reader in (here, buddy):
            (remote,) = (await reader.remote_tier.scan()).shards
            for source in reader.remote_tier.sources(remote):
                view, beside = empty_slot(base.layout), source.beside
                assert beside is not None
                await asyncio.to_thread(verified_chunks.load_image, beside, view)
                end = base.layout.digests_begin
                assert view[:end] == base.view[:end]


async def test_copies_with_bases_are_found_after_a_restart_and_no_base_is_sent_again(
    node: Callable[[int], Node], pair: Pair
) -> None:
    here, buddy = pair
    async with running(here, buddy):
        durable(here.remote_tier, write(here.volume, 1, base_of()))
        await until(lambda: buddy.copies() == [(1, 0)])
    again = [node(0), node(1)]
    again[0].knows(again[1], buddies=(again[1],))
    async with running(*again):
        durable(again[0].remote_tier, write(again[0].volume, 2, base_of()))
        await until(lambda: again[1].copies() == [(1, 0), (2, 0)])
        assert len(set(bases(again[1]).values())) == 1
        assert again[0].remote_tier.status().sent_bytes < 1 << 20


# --- what a receiver takes -------------------------------------------------------------------


class Sent:
    """A shard and its base, as bytes that arrive at `copies`."""

    def __init__(self, here: Volume, keeper: Volume) -> None:
        shard = write(here, 1, base_of())
        assert shard.base_shard is not None
        self.name = ShardName.of(shard)
        self.data = {self.name: shard.path, self.name.base_shard_name: shard.base_shard.path}
        self.keeper = keeper
        self.open()

    def open(self) -> None:
        self.copies = KeptCopies([self.keeper], run=RUN)
        self.copies.scan()

    def begin(self, name: ShardName, *, as_name: ShardName | None = None) -> IncomingCopy | None:
        data = self.data[name].read_bytes()
        layout = Layout.parse(memoryview(data), size_bytes=len(data))
        manifest = memoryview(data[: len(layout.header)] + data[layout.digests_begin :])
        return self.copies.begin(as_name or name, manifest, whose="the test")

    def arrive(self, name: ShardName, *, chunks: int = 99) -> IncomingCopy:
        """So many chunks of the file arrive."""
        part, data = self.begin(name), self.data[name].read_bytes()
        assert part is not None
        for chunk in part.missing[:chunks]:
            begin, end = part.manifest.bounds_of_chunk(chunk)
            with aligned_buffer(end - begin) as buffer, memoryview(buffer) as view:
                view[:] = data[begin:end]
                self.copies.write_chunk(part, chunk, view, whose="the test")
        return part


@pytest.fixture
def arriving(tmp_path: Path) -> Iterator[Sent]:
    here, keeper = (Volume(tmp_path / name / RUN, run=RUN) for name in ("here", "keeper"))
    sent = Sent(here, keeper)
    yield sent
    sent.copies.close()
    here.close()
    keeper.close()


def test_a_copy_without_its_base_is_not_sealed(arriving: Sent) -> None:
    part = arriving.arrive(arriving.name)
    with pytest.raises(FormatError, match=r"base-00000-of-00002\.safetensors"):
        arriving.copies.seal(part)
    assert not arriving.copies.all()
    arriving.copies.seal(arriving.arrive(arriving.name.base_shard_name))
    arriving.copies.seal(part)
    assert [shard.rank for shard in arriving.copies.all()] == [0]


def test_a_partly_received_base_is_resumed(arriving: Sent) -> None:
    part = arriving.arrive(arriving.name.base_shard_name, chunks=1)
    arriving.copies.close()
    arriving.open()
    again = arriving.begin(arriving.name.base_shard_name)
    assert again is not None
    assert len(again.missing) == len(part.manifest.chunk_indices) - 1


def test_a_base_whose_shard_never_arrives_is_deleted_once_its_step_is_not_needed(
    arriving: Sent,
) -> None:
    arriving.copies.seal(arriving.arrive(arriving.name.base_shard_name))
    arriving.copies.drop_superseded(CopiesToKeep(ranks={0: (step_id(1),)}), sender=0)
    assert matching(arriving.keeper.root, "peers/*/base-*"), "it may still come"
    arriving.copies.drop_superseded(CopiesToKeep(ranks={0: (step_id(2),)}), sender=0)
    assert not matching(arriving.keeper.root, "peers/*")


def test_an_image_that_is_not_the_base_of_the_rank_is_refused(arriving: Sent) -> None:
    with pytest.raises(ImageError, match="not the base"):
        arriving.begin(arriving.name, as_name=arriving.name.base_shard_name)
    with pytest.raises(ImageError, match="not the base"):
        arriving.begin(
            arriving.name.base_shard_name, as_name=replace(arriving.name.base_shard_name, rank=1)
        )
    with pytest.raises(ImageError, match="not the image"):
        arriving.begin(arriving.name.base_shard_name, as_name=replace(arriving.name, id=step_id(0)))


@pytest.mark.parametrize(
    "lie",
    [{"rank": 1}, {"world": 3}, {"root": None}, {"size_bytes": 0}, {"size_bytes": -1}],
    ids=str,
)
def test_a_listed_base_that_no_shard_has_is_refused(lie: dict[str, Any]) -> None:
    step = {"epoch": {"number": 1, "nonce": "1f9c2d7a"}, "step": 1}
    listed = {"step_id": step, "rank": 0, "world": 2, "root": "00", "size_bytes": 4096}
    true, false = ({**listed, "base": {**listed, **change}} for change in ({}, lie))
    found = msgspec.json.decode(
        msgspec.json.encode({"run": RUN, "shards": [true]}), type=PodShardListing
    )
    assert found.shards[0].base is not None
    for wrong in (false, {**listed, "base": true}):
        text = msgspec.json.encode({"run": RUN, "shards": [wrong]})
        with pytest.raises(ValueError, match="base"):
            msgspec.json.decode(text, type=PodShardListing)
