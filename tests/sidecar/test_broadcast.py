"""Who reads a chunk that several ranks want, and who waits for whom: without any I/O."""

from __future__ import annotations

import asyncio
import random

import pytest

from keepstep.steps import EpochId, StepId, Tier
from keepstep.wire.trainer import ChunkRun
from keepstep_sidecar.restore.broadcast import Broadcast, Key, Seat

ID = StepId(EpochId(3, "1f9c2d7a"), 7)
ALL = (ChunkRun(rank=0, first=0, end=9),)
FRAME = memoryview(b"")


def sit(broadcast: Broadcast, rank: int, *chunks: int) -> list[Seat]:
    return broadcast.sit(rank, ID, [((0, one), FRAME) for one in chunks])


def leads(seat: Seat) -> bool:
    return seat.outcome.done() and seat.outcome.result() is None


async def pair() -> Broadcast:
    broadcast = Broadcast()
    for rank in range(2):
        broadcast.announce(rank, ID, ALL)
    return broadcast


def test_the_last_to_come_lets_one_read_for_all() -> None:
    async def scenario() -> None:
        broadcast = await pair()
        [first] = sit(broadcast, 0, 0)
        assert not first.outcome.done()
        [second] = sit(broadcast, 1, 0)
        assert leads(first)
        assert first.others == [second]
        assert not second.outcome.done()
        second.filled(Tier.ARCHIVE)
        assert second.outcome.result() is Tier.ARCHIVE

    asyncio.run(scenario())


def test_what_was_not_announced_is_read_at_once() -> None:
    async def scenario() -> None:
        broadcast = await pair()
        assert leads(sit(broadcast, 0, 9)[0])
        assert leads(sit(broadcast, 5, 0)[0])
        other = StepId(ID.epoch, 8)
        assert leads(broadcast.sit(0, other, [((0, 0), FRAME)])[0])

    asyncio.run(scenario())


def test_nobody_waits_for_a_rank_that_is_gone_or_went_past() -> None:
    async def scenario() -> None:
        broadcast = await pair()
        [waiting] = sit(broadcast, 0, 3)
        [ahead] = sit(broadcast, 1, 5)
        assert leads(waiting), "rank 1 will not come back for chunk 3"
        assert not ahead.outcome.done()
        broadcast.leave(0)
        assert leads(ahead)

    asyncio.run(scenario())


def test_a_rank_that_stands_still_is_left_out_until_it_asks_again() -> None:
    async def scenario() -> None:
        broadcast = await pair()
        [first, second] = sit(broadcast, 0, 0, 1)
        broadcast.give_up(ID, first.key)
        assert leads(first)
        assert leads(second), "not waited for at each chunk anew"
        assert leads(sit(broadcast, 0, 2)[0])
        assert leads(sit(broadcast, 1, 0)[0]), "what the other has, it reads alone"
        [met] = sit(broadcast, 0, 3)
        assert not met.outcome.done(), "from here on they meet again"
        sit(broadcast, 1, 3)
        assert leads(met)

    asyncio.run(scenario())


def test_a_seat_that_was_given_up_is_not_read_for() -> None:
    async def scenario() -> None:
        broadcast = await pair()
        [gone] = sit(broadcast, 0, 0)
        broadcast.rise(ID, [gone])
        [other] = sit(broadcast, 1, 0)
        assert leads(other)
        assert other.others == []

    asyncio.run(scenario())


def test_one_that_rises_before_it_could_read_for_others_leaves_them_to_themselves() -> None:
    async def scenario() -> None:
        broadcast = await pair()
        [leader] = sit(broadcast, 0, 0)
        [other] = sit(broadcast, 1, 0)
        assert leads(leader)
        broadcast.rise(ID, [leader])  # its trainer died in that very moment
        assert leads(other)

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(30))
def test_ranks_with_any_wishes_come_through_and_no_chunk_is_read_twice(seed: int) -> None:
    """Also those that announce more than they ask for."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    wishes = [
        sorted((saved, chunk) for saved in range(2) for chunk in range(8) if chance.random() < 0.7)
        for _ in range(chance.randrange(2, 5))
    ]
    read: list[Key] = []

    async def live(broadcast: Broadcast, rank: int) -> None:
        wanted, size = wishes[rank], chance.randrange(1, 4)
        for at in range(0, len(wanted), size):
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            batch = [(key, FRAME) for key in wanted[at : at + size]]
            for seat in broadcast.sit(rank, ID, batch):
                if await seat.outcome is None:
                    read.append(seat.key)
                    for other in seat.others:
                        other.filled(Tier.LOCAL)

    async def scenario() -> None:
        broadcast = Broadcast()
        for rank, wanted in enumerate(wishes):
            runs = [ChunkRun(rank=saved, first=at, end=at + 1) for saved, at in wanted]
            # more than it asks for, but as for columns: nothing behind its last one
            if wanted and chance.random() < 0.5:
                first, last = wanted[0], wanted[-1]
                for saved in range(first[0], last[0] + 1):
                    begin = first[1] if saved == first[0] else 0
                    end = last[1] + 1 if saved == last[0] else 8
                    runs.append(ChunkRun(rank=saved, first=begin, end=end))
                runs = [one for one in runs if one.end - one.first > 1] or runs
            broadcast.announce(rank, ID, runs)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for rank in range(len(wishes)):
                group.create_task(live(broadcast, rank))

    asyncio.run(scenario())
    asked = {key for each in wishes for key in each}
    assert sorted(read) == sorted(asked)
