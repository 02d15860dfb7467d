"""A shard goes to a buddy, stays there, and comes back; byte for byte."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from keepstep.errors import StorageError
from keepstep.steps import TierAnswer
from keepstep_sidecar.tiers.peer import buddy as buddies
from keepstep_sidecar.tiers.remote_tier import RunFacts
from keepstep_sidecar.volume.files import Filesystem
from keepstep_sidecar.volume.run_tree import LocalShard
from tests.harness import until
from tests.peer.nodes import BIG, Node, running, same
from tests.tiers import reading
from tests.tiers.local import committed, durable, gone
from tests.volume.images import Slot, empty_slot, step_id

Make = Callable[..., Node]
Pair = tuple[Node, Node]


async def sent(here: Node, buddy: Node, *steps: int) -> tuple[Slot, LocalShard]:
    """Steps of rank 0 that became durable here, and then the buddy's copies, one by one; the
    last."""
    for step in steps:
        slot, found = here.write(step, rank=0)
        durable(here.remote_tier, found)
        await until(lambda step=step: (step, 0) in buddy.copies())
    return slot, found


async def test_spare_files_are_deleted_to_store_a_copy_on_a_full_drive(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, buddy = pair
    buddy.volume.delete_step(buddy.write(1, rank=1)[1].step_id)
    _, found = here.write(5, rank=0)
    allocate = Filesystem.allocate

    def full(self: Filesystem, fd: int, size_bytes: int) -> None:
        if list(buddy.volume.root.glob("spare/*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(self, fd, size_bytes)

    assert list(buddy.volume.root.glob("spare/*"))
    monkeypatch.setattr(Filesystem, "allocate", full)
    async with running(here, buddy):
        durable(here.remote_tier, found)
        await until(lambda: buddy.copies() == [(5, 0)])


async def test_a_copy_on_the_local_node_is_read_locally(pair: Pair) -> None:
    here, buddy = pair
    async with running(here, buddy):
        slot, _ = await sent(here, buddy, 5)
        buddy.knows()  # the other pod is gone
        (remote,) = (await buddy.remote_tier.scan()).shards
        (source,) = buddy.remote_tier.sources(remote)
        assert "from the copy kept here" in source.where
        view = empty_slot(slot.layout)
        await reading.load(buddy.remote_tier, remote, view)
        assert same(view, slot)


async def test_copies_are_found_again_after_a_restart(node: Make, pair: Pair) -> None:
    here, buddy = pair
    async with running(here, buddy):
        await sent(here, buddy, 5)
    again = node(1)
    async with running(again):
        await until(lambda: again.copies() == [(5, 0)])


async def test_a_copy_with_a_broken_seal_is_moved_to_quarantine(node: Make, pair: Pair) -> None:
    here, buddy = pair
    async with running(here, buddy):
        _, found = await sent(here, buddy, 5)
    path = buddy.copy_path(found.step_id)
    with path.open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"x")
    again = node(1)
    again.knows()
    async with running(again):
        assert (await again.remote_tier.scan()).answer is TierAnswer.NONE
    assert [path.name for path in (again.root / "quarantine").iterdir()] == [
        f"{found.step_id}.rank-00000-of-00002.torn.1"
    ]


async def test_copies_of_shards_that_the_sender_lost_are_not_deleted(pair: Pair) -> None:
    """A sender that comes back empty wants nothing; its copies are all that is left."""
    here, buddy = pair
    async with running(here, buddy):
        _, found = await sent(here, buddy, 5)
        gone(here.remote_tier, [found.step_id])
        committed(here.remote_tier, step_id(9))
        _, other = here.write(7, rank=1)
        durable(here.remote_tier, other)
        await until(lambda: not here.remote_tier.status().backlog)
        assert (5, 0) in buddy.copies()


async def test_space_is_freed_by_deleting_copies_but_never_the_last_committed_one(
    pair: Pair,
) -> None:
    here, buddy = pair
    async with running(here, buddy):
        await sent(here, buddy, 1, 2, 3)
        committed(here.remote_tier, step_id(2))
        await until(lambda: buddy.copies() == [(2, 0), (3, 0)])
        assert await buddy.remote_tier.free_volume_space(1 << 60)
        assert buddy.copies() == [(2, 0)]
        assert not await buddy.remote_tier.free_volume_space(1 << 60)


async def test_space_is_freed_by_deleting_copies_of_a_former_sender_after_a_restart(
    node: Make, pair: Pair
) -> None:
    here, buddy = pair
    async with running(here, buddy):
        await sent(here, buddy, 1, 2, 3)
    again = node(1)  # and nobody sends to it any more
    async with running(again):
        await until(lambda: again.copies() == [(1, 0), (2, 0), (3, 0)])
        assert not await again.remote_tier.free_volume_space(1 << 60), "it knows of no commit"
        again.remote_tier.set_run_facts(RunFacts(commit=lambda: step_id(2)))
        assert await again.remote_tier.free_volume_space(1 << 60)
        assert again.copies() == [(2, 0)]


async def test_a_full_peer_reports_the_missing_space_and_keeps_its_copies(node: Make) -> None:
    here, buddy = node(0), node(1, capacity_bytes=200_000)
    here.knows(buddy, buddies=(buddy,))
    async with running(here, buddy):
        await sent(here, buddy, 1)
        _, big = here.write(2, rank=0, parameters=BIG)
        durable(here.remote_tier, big)
        await until(lambda: here.remote_tier.status().trouble)
        assert "bytes needed for a copy" in here.remote_tier.status().trouble
        assert here.remote_tier.status().backlog == 1
        assert not list(buddy.root.rglob("*.part"))
        assert not here.remote_tier.replicator.is_step_in_transfer(big.step_id)


async def test_a_peer_that_lags_behind_drops_old_copies_and_clears_its_last_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps come as fast as they are sent: while one is on its way, the next becomes durable."""
    here, buddy = pair
    loop, really = asyncio.get_running_loop(), buddies.send_shard
    coming = {step: here.write(step, rank=0)[1] for step in range(2, 12)}
    seen: list[tuple[str, int]] = []

    async def meanwhile(step: int) -> None:
        durable(here.remote_tier, coming[step])
        committed(here.remote_tier, step_id(max(step - 2, 1)))
        seen.append((here.remote_tier.status().trouble, here.remote_tier.status().backlog))

    def send(found: LocalShard, *others: Any) -> int:
        if not seen:
            seen.append(("", 0))
            raise StorageError("no space there")
        if (step := found.step_id.step + 1) in coming:
            asyncio.run_coroutine_threadsafe(meanwhile(step), loop).result()
        return really(found, *others)

    monkeypatch.setattr(buddies, "send_shard", send)
    async with running(here, buddy):
        committed(here.remote_tier, step_id(1), [here.write(1, rank=0)[1]])
        await until(lambda: (11, 0) in buddy.copies())
        assert seen[1:] == [("no space there", 2), *[("", 2)] * 9], "trouble, backlog"
        assert buddy.copies()[0] >= (9, 0)
