"""Which ranks of this machine wait for the same chunk, so that it is read once for all of them.

A rank announces which chunks it will ask for, and then asks in the order of (saved rank, chunk). A
chunk is read when the last of the ranks that want it has asked. So the ranks keep pace with each
other. That costs nothing, because the collective at the end of a restore makes them wait for the
slowest rank anyway.

There is no deadlock: all ranks that want the lowest chunk still wanted either ask for it or will
ask for it next. And no rank waits long for a rank that does not ask. A rank whose lease has ended,
or that went past a chunk, does not count. A rank that stands still is left out after `patience_s`
until it asks again. It then reads alone what the others already have, and joins them at later
chunks.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

from keepstep.errors import StorageError
from keepstep.steps import StepId, Tier
from keepstep.wire.trainer import ChunkRun

PATIENCE_S = 15.0
"""How long to wait for a rank that does not ask for a chunk that others wait for."""

_LEFT = "the rank has let go of its window"

Key = tuple[int, int]
"""The saved rank and the chunk's number."""


@dataclass(eq=False)
class SharedChunk:
    """A chunk for which ranks have asked, each with a frame. `tier`: where the chunk came from; set
    when all frames are filled."""

    id: StepId
    key: Key
    tier: asyncio.Future[Tier]
    frames: list[tuple[int, memoryview]] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        self.tier.set_exception(error)
        self.tier.exception()  # mark as retrieved: all who waited may have left


Read = Callable[[Sequence[SharedChunk]], Awaitable[Tier]]
"""Fills all frames of chunks that belong to one saved rank."""


class _Announced:
    """The chunks for which a rank still has to ask."""

    def __init__(self, step_id: StepId, runs: Iterable[ChunkRun]) -> None:
        self.id = step_id
        self.late = False
        self.until: Key = (-1, -1)
        self._runs = sorted(((run.rank, run.first), (run.rank, run.end)) for run in runs)

    def will_ask(self, key: Key) -> bool:
        """Whether the rank announced the chunk, and has neither asked for it nor gone past it."""
        at = bisect_right(self._runs, key, key=itemgetter(0)) - 1
        return key > self.until and at >= 0 and key < self._runs[at][1]


class SharedReads:
    """The shared reads of one sidecar. Call all methods on the event loop."""

    def __init__(self, read: Read, *, patience_s: float = PATIENCE_S) -> None:
        self._read = read
        self._patience_s = patience_s
        self._announced: dict[int, _Announced] = {}
        self._waiting: dict[tuple[StepId, Key], SharedChunk] = {}
        self._reads: dict[asyncio.Task[None], Sequence[SharedChunk]] = {}

    def announce(self, rank: int, step_id: StepId, runs: Iterable[ChunkRun]) -> None:
        """All chunks of this step that the rank will ask for. Replaces its former announcement."""
        self._announced[rank] = _Announced(step_id, runs)
        self._settle()

    def leave(self, rank: int) -> None:
        """The rank will not ask any more, and has given up its frames."""
        self._announced.pop(rank, None)
        for chunk in [*self._waiting.values(), *chain.from_iterable(self._reads.values())]:
            chunk.frames = [frame for frame in chunk.frames if frame[0] != rank]
        for read, chunks in self._reads.items():
            if not any(chunk.frames for chunk in chunks):
                read.cancel()
        self._settle()

    async def fill(
        self, rank: int, step_id: StepId, chunks: Sequence[tuple[Key, memoryview]]
    ) -> list[Tier]:
        """Return when every frame has its chunk. Raises what `Read` raises, once the frames are no
        longer written to. If this is cancelled, the rank must `leave`."""
        mine = self._join(rank, step_id, chunks)
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._give_up, mine)
        try:
            for chunk in mine:  # wait for all before the first error is raised
                await asyncio.wait([chunk.tier])
            return [chunk.tier.result() for chunk in mine]
        finally:
            timer.cancel()

    def _join(
        self, rank: int, step_id: StepId, chunks: Sequence[tuple[Key, memoryview]]
    ) -> list[SharedChunk]:
        """Join the rank to shared chunks. Chunks that it has not announced are read for it
        alone."""
        announced = self._announced.get(rank)
        if announced is None or announced.id != step_id:
            announced = _Announced(step_id, ())
        announced.late = False
        loop, alone, together = asyncio.get_running_loop(), list[SharedChunk](), list[SharedChunk]()
        for key, frame in chunks:
            new = SharedChunk(step_id, key, loop.create_future())
            shared = announced.will_ask(key)
            chunk = self._waiting.setdefault((step_id, key), new) if shared else new
            chunk.frames.append((rank, frame))
            (together if shared else alone).append(chunk)
        announced.until = max([announced.until, *(chunk.key for chunk in together)])
        self._begin(alone)
        self._settle()
        return [*alone, *together]

    def _give_up(self, mine: Iterable[SharedChunk]) -> None:
        """Stop waiting for the ranks that have not asked for these chunks."""
        for chunk in mine:
            for announced in self._missing(chunk):
                announced.late = True
        self._settle()

    def _missing(self, chunk: SharedChunk) -> list[_Announced]:
        return [
            announced
            for announced in self._announced.values()
            if announced.id == chunk.id and not announced.late and announced.will_ask(chunk.key)
        ]

    def _settle(self) -> None:
        """Read all chunks for which every rank that wants them has asked."""
        ready = [
            chunk
            for chunk in self._waiting.values()
            if not chunk.frames or not self._missing(chunk)
        ]
        for chunk in ready:
            del self._waiting[chunk.id, chunk.key]
            if not chunk.frames:
                chunk.fail(StorageError(_LEFT))
        self._begin([chunk for chunk in ready if chunk.frames])

    def _begin(self, chunks: Iterable[SharedChunk]) -> None:
        images: dict[tuple[StepId, int], list[SharedChunk]] = {}
        for chunk in chunks:
            images.setdefault((chunk.id, chunk.key[0]), []).append(chunk)
        for group in images.values():
            read = asyncio.get_running_loop().create_task(self._bring(group), name="read chunks")
            self._reads[read] = group
            read.add_done_callback(self._reads.pop)

    async def _bring(self, chunks: Sequence[SharedChunk]) -> None:
        try:
            tier = await self._read(chunks)
        except BaseException as error:
            for chunk in chunks:
                chunk.fail(error if isinstance(error, Exception) else StorageError(_LEFT))
            if not isinstance(error, Exception):
                raise
        else:
            for chunk in chunks:
                chunk.tier.set_result(tier)
