"""Who reads a chunk that several ranks want, and who waits for whom: without any bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from keepstep.errors import StorageError
from keepstep.steps import EpochId, StepId, Tier
from keepstep.wire.trainer import ChunkRun
from keepstep_sidecar.restore.shared_reads import Key, SharedChunk, SharedReads

ID = StepId(EpochId(3, "1f9c2d7a"), 7)
ALL = (ChunkRun(rank=0, first=0, end=9),)
FRAME = memoryview(b"")


class Node:
    """Ranks that announced `ALL`. `reads`: chunks and the ranks that got them, in that order."""

    def __init__(self, *, patience_s: float = 60.0, ranks: int = 2) -> None:
        self.reads: list[tuple[int, list[int]]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.error: Exception | None = None
        self.shared = SharedReads(self._read, patience_s=patience_s)
        for rank in range(ranks):
            self.shared.announce(rank, ID, ALL)

    async def _read(self, chunks: Sequence[SharedChunk]) -> Tier:
        self.reads += [(chunk.key[1], [rank for rank, _ in chunk.frames]) for chunk in chunks]
        await self.hold.wait()
        if self.error is not None:
            raise self.error
        return Tier.ARCHIVE

    def ask(self, rank: int, *chunks: int, step_id: StepId = ID) -> asyncio.Task[list[Tier]]:
        frames = [((0, chunk), FRAME) for chunk in chunks]
        return asyncio.ensure_future(self.shared.fill(rank, step_id, frames))

    async def comes(
        self, rank: int, *chunks: int, step_id: StepId = ID
    ) -> asyncio.Task[list[Tier]]:
        """It has asked, and everything that follows at once has happened."""
        asked = self.ask(rank, *chunks, step_id=step_id)
        await settled()
        return asked


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_shared_chunk_is_read_once_when_the_last_rank_has_requested_it() -> None:
    node = Node()
    first = await node.comes(0, 0)
    assert node.reads == []
    second = await node.comes(1, 0)
    assert node.reads == [(0, [0, 1])]
    assert await first == await second == [Tier.ARCHIVE]


async def test_no_rank_waits_for_a_rank_that_disconnected_or_has_passed_the_chunk() -> None:
    node = Node()
    waiting = await node.comes(0, 3)
    ahead = await node.comes(1, 5)
    assert await waiting, "rank 1 will not come back for chunk 3"
    assert not ahead.done()
    node.shared.leave(0)
    assert await ahead


async def test_a_stalled_rank_is_not_waited_for_until_its_next_request() -> None:
    node = Node(patience_s=0.5)
    assert await node.ask(0, 0, 1)
    assert node.reads == [(0, [0]), (1, [0])], "not waited for at each chunk anew"
    assert await node.ask(0, 2)
    assert await node.ask(1, 0), "what the other has, it reads alone"
    met = await node.comes(0, 3)
    assert not met.done(), "from here on they meet again"
    assert await node.ask(1, 3)
    assert node.reads[-1] == (3, [0, 1])
    await met


@pytest.mark.parametrize("leaver", [0, 1])
async def test_a_shared_read_is_cancelled_only_when_all_waiting_ranks_have_disconnected(
    leaver: int,
) -> None:
    node = Node()
    node.hold.clear()
    asked = [node.ask(rank, 0) for rank in range(2)]
    await settled()
    asked[leaver].cancel()  # its trainer died in that very moment
    node.shared.leave(leaver)
    await settled()
    assert not asked[1 - leaver].done()
    node.shared.leave(1 - leaver)
    with pytest.raises(StorageError, match="let go"):
        await asked[1 - leaver]


async def test_a_read_error_reaches_all_waiting_ranks_but_not_later_requests() -> None:
    node = Node()
    node.error = StorageError("the drive is gone")
    asked = [node.ask(rank, 0, 1) for rank in range(2)]
    for task in asked:
        with pytest.raises(StorageError, match="drive"):
            await task
    node.error = None
    assert await node.ask(0, 0)


@pytest.mark.parametrize("seed", range(30))
async def test_any_requests_of_ranks_complete_and_no_chunk_is_read_twice(seed: int) -> None:
    """Also those that announce more than they ask for."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    requests = [
        sorted((saved, chunk) for saved in range(2) for chunk in range(8) if chance.random() < 0.7)
        for _ in range(chance.randrange(2, 5))
    ]
    read: list[Key] = []

    async def bring(chunks: Sequence[SharedChunk]) -> Tier:
        read.extend(chunk.key for chunk in chunks)
        await asyncio.sleep(0)
        return Tier.LOCAL

    async def live(rank: int) -> None:
        chunks, size = requests[rank], chance.randrange(1, 4)
        for at in range(0, len(chunks), size):
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            await reads.fill(rank, ID, [(key, FRAME) for key in chunks[at : at + size]])

    reads = SharedReads(bring)
    for rank, chunks in enumerate(requests):
        runs = [ChunkRun(rank=saved, first=at, end=at + 1) for saved, at in chunks]
        # more than it asks for, but as for columns: nothing behind its last one
        if chunks and chance.random() < 0.5:
            first, last = chunks[0], chunks[-1]
            for saved in range(first[0], last[0] + 1):
                begin = first[1] if saved == first[0] else 0
                end = last[1] + 1 if saved == last[0] else 8
                runs.append(ChunkRun(rank=saved, first=begin, end=end))
            runs = [run for run in runs if run.end - run.first > 1] or runs
        reads.announce(rank, ID, runs)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for rank in range(len(requests)):
            group.create_task(live(rank))
    asked = {key for each in requests for key in each}
    assert sorted(read) == sorted(asked)
