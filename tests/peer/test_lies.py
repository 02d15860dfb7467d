"""Peers that are slow, away, or give other bytes than promised: named, and gone around."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from keepstep.errors import DigestError, ImageError
from keepstep.image.layout import CHUNK_BYTES
from keepstep_sidecar.tiers.peer import protocol
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.tiers.peer.protocol import CopiesToKeep
from keepstep_sidecar.tiers.peer.served_shards import OpenShard
from tests.harness import flip, until
from tests.peer.nodes import BIG, Node, running, same
from tests.tiers import reading
from tests.tiers.local import durable, gone
from tests.volume.images import RUN, empty_slot, step_id

Make = Callable[..., Node]


async def two_copies(here: Node, *buddies: Node, parameters: int = BIG):
    """A shard of `here` that all buddies hold, and that its own drive has lost."""
    here.knows(*buddies, buddies=buddies)
    slot, found = here.write(5, rank=0, parameters=parameters)
    durable(here.remote_tier, found)
    await until(lambda: all(buddy.copies() for buddy in buddies))
    gone(here.remote_tier, [found.step_id])
    here.volume.delete_step(found.step_id)
    return slot, found


async def test_a_peer_that_sends_wrong_bytes_is_reported_and_another_peer_is_used(
    node: Make,
) -> None:
    here, liar, honest = node(0), node(1), node(2)
    async with running(here, liar, honest):
        slot, found = await two_copies(here, liar, honest)
        flip(liar.copy_path(found.step_id), 2 * CHUNK_BYTES + 5)
        (remote,) = (await here.remote_tier.scan()).shards
        assert remote.key == (liar.address, honest.address)
        view = empty_slot(slot.layout)
        await reading.load(here.remote_tier, remote, view)
        assert same(view, slot)
        # it is not offered again as a holder of this shard, and nothing of it was deleted
        (remote,) = (await here.remote_tier.scan()).shards
        assert remote.key == (honest.address,)
        assert liar.copies() == [(5, 0)]


async def test_the_error_names_the_peer_with_wrong_bytes_when_no_other_copy_exists(
    node: Make,
) -> None:
    here, liar = node(0), node(1)
    async with running(here, liar):
        slot, found = await two_copies(here, liar)
        flip(liar.copy_path(found.step_id), 2 * CHUNK_BYTES + 5)
        (remote,) = (await here.remote_tier.scan()).shards
        view = empty_slot(slot.layout)
        with pytest.raises(DigestError, match=r"node rank 1 .*chunk 2 .*damaged"):
            await reading.load(here.remote_tier, remote, view)
        assert bytes(view[-4096:]) == bytes(4096)
        assert here.remote_tier.sources(remote) == []


@pytest.mark.parametrize("what", ["table", "control"])
async def test_a_damaged_table_or_seal_is_found_before_any_chunk_is_used(
    node: Make, what: str
) -> None:
    here, liar = node(0), node(1)
    async with running(here, liar):
        slot, found = await two_copies(here, liar, parameters=6000)
        layout = slot.layout
        at = layout.digests_begin if what == "table" else layout.control_begin
        flip(liar.copy_path(found.step_id), at)
        (remote,) = (await here.remote_tier.scan()).shards
        with pytest.raises(ImageError, match="node rank 1"):
            await reading.load(here.remote_tier, remote, empty_slot(layout))


async def test_a_peer_that_lists_a_wrong_root_digest_is_reported(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, liar = node(0), node(1)
    async with running(here, liar):
        slot, _ = await two_copies(here, liar, parameters=6000)
        truth = liar.remote_tier._served.shards.listing

        def lie() -> protocol.PodShardListing:
            listing = truth()
            return replace(
                listing, shards=tuple(replace(shard, root="0" * 32) for shard in listing.shards)
            )

        monkeypatch.setattr(liar.remote_tier._served.shards, "listing", lie)
        (remote,) = (await here.remote_tier.scan()).shards
        with pytest.raises(DigestError, match=r"node rank 1 .*was promised"):
            await reading.load(here.remote_tier, remote, empty_slot(slot.layout))


async def test_no_more_chunks_are_sent_to_a_peer_that_claims_another_root_digest(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, liar = node(0), node(1)
    here.knows(liar, buddies=(liar,))
    monkeypatch.setattr(liar.remote_tier._copies, "seal", lambda part: "f" * 32)
    async with running(here, liar):
        _, found = here.write(5, rank=0)
        durable(here.remote_tier, found)
        await until(lambda: "gets no copy of this shard again" in here.remote_tier.status().trouble)
        assert here.remote_tier.status().sent == 0
        assert here.remote_tier.status().backlog == 1


async def test_a_peer_refuses_bytes_that_were_corrupted_in_transit(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, buddy = node(0), node(1)
    here.knows(buddy, buddies=(buddy,))
    write, seen = KeptCopies.write_chunk, []

    def spoil(self: KeptCopies, part, chunk, data, *, whose) -> None:
        if not seen:
            data[100] ^= 1
            seen.append(chunk)
        write(self, part, chunk, data, whose=whose)

    monkeypatch.setattr(KeptCopies, "write_chunk", spoil)
    async with running(here, buddy):
        _, found = here.write(5, rank=0, parameters=BIG)
        durable(here.remote_tier, found)
        await until(lambda: "is damaged" in here.remote_tier.status().trouble)
        assert "node rank 0 of run team/gpt" in here.remote_tier.status().trouble
        await until(lambda: buddy.copies() == [(5, 0)])  # the next try sends what is missing


async def test_a_transfer_continues_from_another_peer_when_one_disappears(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, dying, other = node(0), node(1), node(2)
    async with running(here, dying, other):
        slot, _ = await two_copies(here, dying, other)
        (remote,) = (await here.remote_tier.scan()).shards
        read = OpenShard.read

        def die(self: OpenShard, into: memoryview, begin: int) -> None:
            if "/drives/1/" in str(self.path) and begin >= 3 * CHUNK_BYTES:
                raise OSError("the drive is gone")
            read(self, into, begin)

        monkeypatch.setattr(OpenShard, "read", die)
        view = empty_slot(slot.layout)
        await reading.load(here.remote_tier, remote, view)
        assert same(view, slot)


async def test_a_cancelled_load_leaves_the_slot_alone(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, slow = node(0), node(1)
    async with running(here, slow):
        slot, _ = await two_copies(here, slow)
        (remote,) = (await here.remote_tier.scan()).shards
        read = OpenShard.read

        def dawdle(self: OpenShard, into: memoryview, begin: int) -> None:
            time.sleep(0.3 if begin > 0 and len(into) == CHUNK_BYTES else 0.0)
            read(self, into, begin)

        monkeypatch.setattr(OpenShard, "read", dawdle)
        view = empty_slot(slot.layout)
        loading = asyncio.create_task(reading.load(here.remote_tier, remote, view))
        await until(lambda: any(view[:CHUNK_BYTES:65536]))
        began = time.monotonic()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert time.monotonic() - began < 5
        before = bytes(view)
        await asyncio.sleep(0.5)
        assert bytes(view) == before


async def test_copies_respect_the_bandwidth_limit_and_a_slow_link_sends_steps_less_often(
    node: Make,
) -> None:
    here, buddy = node(0), node(1)
    await here.remote_tier.close()
    here.remote_tier = here.make(bytes_per_second=20 << 20)
    here.knows(buddy, buddies=(buddy,))
    async with running(here, buddy):
        began = time.monotonic()
        founds = [here.write(step, rank=0, parameters=BIG)[1] for step in (5, 6, 7, 8, 9)]
        durable(here.remote_tier, founds[0])
        await until(lambda: here.remote_tier.replicator.is_step_in_transfer(founds[0].step_id))
        for found in founds[1:]:
            durable(here.remote_tier, found)
        assert here.remote_tier.replicator.is_step_in_transfer(
            founds[3].step_id
        )  # step 8 is next, and stays here until then
        assert not here.remote_tier.replicator.is_step_in_transfer(founds[2].step_id)
        await until(lambda: buddy.copies()[:2] == [(5, 0), (8, 0)])
        sent = here.remote_tier.status().sent_bytes
        assert sent / (time.monotonic() - began) < 1.5 * (20 << 20)


def test_the_requested_ranks_of_a_peer_are_bounded_and_replaced_by_its_next_request() -> None:
    copies = KeptCopies([], run=RUN)
    commit = step_id(7)
    for wrong in ({-1: ()}, {1 << 20: ()}, {1 << 70: ()}, dict.fromkeys(range(70_000), ())):
        with pytest.raises(ValueError, match="ranks"):
            CopiesToKeep(committed=commit, ranks=wrong)
    for _ in range(3):
        for sender in range(200):
            ranks = dict.fromkeys(range(sender * 1000 % 60_000, sender * 1000 % 60_000 + 1000), ())
            copies.drop_superseded(CopiesToKeep(committed=commit, ranks=ranks), sender=sender)
    assert sum(len(request.ranks) for request in copies._needed.values()) <= 1 << 16
    copies.drop_superseded(CopiesToKeep(committed=commit, ranks={3: ()}), sender=199)
    assert list(copies._needed[199].ranks) == [3]


@pytest.mark.parametrize(
    "lie",
    [
        {"rank": 65_536, "world": 65_537},
        {"rank": (1 << 31) - 2, "world": (1 << 31) - 1},
        {"rank": 0, "world": 2, "alike": {"runs": [[0, 2, 2]]}},
        {"rank": 0, "world": 2, "alike": {"runs": [[0, 1 << 40, 1 << 40]]}},
        {"rank": 0, "world": 2, "alike": {"runs": [[-1, 0, 1]]}},
    ],
    ids=str,
)
def test_an_impossible_rank_is_refused_before_memory_is_allocated_for_it(
    lie: dict[str, Any],
) -> None:
    """What is held of a step is a number with a bit for each rank up to the last."""
    forged = {"epoch": {"number": 1, "nonce": "1f9c2d7a"}, "step": 1}
    listed = {"step_id": forged, "root": "00", "size_bytes": 4096, **lie}
    text = msgspec.json.encode({"run": RUN, "shards": [listed]})
    with pytest.raises(ValueError, match=r"rank|twins"):
        msgspec.json.decode(text, type=protocol.PodShardListing)
    true = msgspec.json.encode(
        {"run": RUN, "shards": [{**listed, "rank": 0, "world": 2, "alike": {"runs": [[0, 1, 1]]}}]}
    )
    assert len(msgspec.json.decode(true, type=protocol.PodShardListing).shards) == 1
