"""Replicas of one model: only what the buddy's own image has not alike goes over the link."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest

from keepstep.image.layout import CHUNK_BYTES
from keepstep_sidecar.tiers import incoming_copy
from keepstep_sidecar.tiers.incoming_copy import IncomingCopy
from keepstep_sidecar.tiers.peer import buddy as sending
from keepstep_sidecar.volume.files import WRITER_NICENESS, RateLimit
from keepstep_sidecar.volume.run_tree import LocalShard
from tests.harness import flip, until, verify_image
from tests.peer.nodes import BIG, Node, running, same
from tests.tiers import reading
from tests.tiers.local import durable
from tests.volume.images import RUN, Slot, empty_slot, make_layout, staged

Pair = tuple[Node, Node]


def alike(rank: int, step: int = 5) -> Slot:
    """The same bytes for each rank, behind a header of its own."""
    slot, model = (staged(make_layout(rank=at, parameters=BIG), step) for at in (rank, 0))
    begin, end = len(slot.layout.header), slot.layout.digests_begin
    slot.view[begin:end] = model.view[begin:end]
    return slot


def write(node: Node, slot: Slot) -> LocalShard:
    node.volume.write(slot.view, slot.layout, slot.control)
    found = [shard for shard in node.volume.scan().shards if shard.rank == slot.layout.rank]
    return max(found, key=lambda shard: shard.step_id)


async def is_whole(here: Node, buddy: Node, slot: Slot, found: LocalShard) -> None:
    """Read back from the buddy, bit by bit."""
    here.volume.delete_step(found.step_id)
    (remote,) = [shard for shard in (await here.remote_tier.scan()).shards if shard.rank == 0]
    view = empty_slot(slot.layout)
    await reading.load(here.remote_tier, remote, view)
    assert same(view, slot)
    verify_image(view, slot.layout, run=RUN, step_id=found.step_id)


async def test_chunks_that_the_image_of_the_peer_already_contains_are_not_sent(pair: Pair) -> None:
    here, buddy = pair
    slot = alike(0)
    async with running(here, buddy):
        write(buddy, alike(1))
        found = write(here, slot)
        durable(here.remote_tier, found)
        await until(lambda: buddy.copies() == [(5, 0)])
        await until(lambda: here.remote_tier.status().sent == 1)
        assert here.remote_tier.status().sent_bytes == CHUNK_BYTES, "the one with the header"
        await is_whole(here, buddy, slot, found)


async def test_local_copying_on_the_peer_yields_to_its_own_writes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_copy, "_TAKE_S", 0.5)
    here, buddy = pair
    nice: list[int] = []
    monkeypatch.setattr(buddy.volumes.pace, "_bytes_per_second", 64 * CHUNK_BYTES)
    real = IncomingCopy._write_own

    def noted(self: IncomingCopy, *given: Any, **more: Any) -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        real(self, *given, **more)

    monkeypatch.setattr(IncomingCopy, "_write_own", noted)
    async with running(here, buddy):
        buddy.volumes.pace.wait(64 * 100 * CHUNK_BYTES)  # what others write in the next 100 s
        write(buddy, alike(1))
        durable(here.remote_tier, write(here, alike(0)))
        await until(lambda: here.remote_tier.status().sent == 1)
        whole = here.remote_tier.status().sent_bytes
        assert (nice, whole) == ([], alike(0).layout.digests_begin), "all of it was sent"
        monkeypatch.setattr(incoming_copy, "_TAKE_S", 20.0)
        with buddy.volumes.pace.lift_limit():
            write(buddy, alike(1, step=6))
            durable(here.remote_tier, write(here, alike(0, step=6)))
            await until(lambda: here.remote_tier.status().sent == 2)
        assert here.remote_tier.status().sent_bytes == whole + CHUNK_BYTES
        assert set(nice) == {max(WRITER_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))}


def test_a_low_priority_write_proceeds_only_when_the_rate_limit_is_idle() -> None:
    pace, began = RateLimit(1 << 18), time.monotonic()
    assert pace.wait_with_lowest_priority(1 << 18, until=began)
    assert not pace.wait_with_lowest_priority(1 << 18, until=time.monotonic() + 0.1)
    assert pace.wait_with_lowest_priority(1 << 18, until=began + 60)
    assert time.monotonic() - began >= 1.0
    assert RateLimit(None).wait_with_lowest_priority(1 << 40, until=began)


async def test_chunks_that_are_corrupt_on_the_peer_are_sent(pair: Pair) -> None:
    here, buddy = pair
    slot = alike(0)
    async with running(here, buddy):
        flip(write(buddy, alike(1)).path, 2 * CHUNK_BYTES + 77)
        found = write(here, slot)
        durable(here.remote_tier, found)
        await until(lambda: here.remote_tier.status().sent == 1)
        assert here.remote_tier.status().sent_bytes == 2 * CHUNK_BYTES
        await is_whole(here, buddy, slot, found)


async def test_sending_stops_once_the_peer_has_the_same_image_durable(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(sending.protocol, "STREAMS", 1)
    here, buddy = pair
    slot, own = alike(0), alike(1)
    put = buddy.remote_tier._copies.write_chunk

    def write_own_first(part, chunk, data, *, whose):  # type: ignore[no-untyped-def]
        put(part, chunk, data, whose=whose)
        if chunk == 1:
            write(buddy, own)

    monkeypatch.setattr(buddy.remote_tier._copies, "write_chunk", write_own_first)
    async with running(here, buddy):
        found = write(here, slot)
        durable(here.remote_tier, found)
        await until(lambda: here.remote_tier.status().sent == 1)
        chunks = -(-slot.layout.digests_begin // CHUNK_BYTES)
        assert here.remote_tier.status().sent_bytes == 2 * CHUNK_BYTES < chunks * CHUNK_BYTES
        await is_whole(here, buddy, slot, found)


async def test_a_copy_starts_over_after_an_error_in_its_file(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, buddy = pair
    slot, broken = alike(0), []
    real = IncomingCopy.write

    def fail_once(self: IncomingCopy, *given: Any, **more: Any) -> None:
        if not broken:
            broken.append(self.path)
            raise OSError(errno.EIO, "a bad block")
        real(self, *given, **more)

    monkeypatch.setattr(IncomingCopy, "write", fail_once)
    async with running(here, buddy):
        write(buddy, alike(1))
        found = write(here, slot)
        durable(here.remote_tier, found)
        await until(lambda: here.remote_tier.status().sent == 1)
        assert broken
        assert here.remote_tier.status().failures == 1, "it was told, and the file thrown away"
        await is_whole(here, buddy, slot, found)
