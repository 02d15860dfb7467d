"""Makes staged images durable: carries out what `PersistPlanner` decides.

The slot is pinned while it is written, so nobody fills it. One exception cannot be excluded, an
image that a new sidecar found while its trainer was about to fill the slot; but a trainer zeroes
the seal before it writes anything else, so a seal that is still there after the write proves that
the bytes were whole, and a file without that proof is quarantined.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from keepstep.core.persist_planner import PersistCounts, PersistPlanner, Write
from keepstep.core.schedule import Grid
from keepstep.errors import NoSpaceError
from keepstep.image import ControlPage
from keepstep.steps import StepId
from keepstep_sidecar.commit.committer import Committer
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.memory.budget import LEAST_SLOTS
from keepstep_sidecar.memory.slot_pool import SlotPool, SlotSet
from keepstep_sidecar.volume.volume import Written
from keepstep_sidecar.volume.writer import CUT_OFF

Spawn = Callable[[Coroutine[Any, Any, None], str], None]


@dataclass
class PersistTotals:
    """Since the start, over all ranks."""

    bytes: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    failed: int = 0


class Persister:
    """The writes of this machine's ranks."""

    def __init__(
        self,
        keeper: SlotPool,
        *,
        grid: Grid,
        executors: Sequence[Executor],
        changes: Changes,
        spawn: Spawn,
    ) -> None:
        """`executors`: one for each volume, of one thread: a drive writes one image at a time, and
        none is idle while another one has a queue."""
        self.totals = PersistTotals()
        self.trouble = ""
        self.failed: StepId | None = None
        self.committer: Committer
        self._keeper = keeper
        self._waiting = False
        self._executors = executors
        self._changes = changes
        self._spawn = spawn
        self._ranks: frozenset[int] = frozenset()
        self._writing: set[tuple[int, StepId]] = set()
        self.planner = PersistPlanner((), grid)

    # --- events ------------------------------------------------------------------------------

    def plan_for(self, ranks: Iterable[int], *, slots: int) -> None:
        """These are this machine's ranks, with so many slots each at least.

        When that changed, what they hold is planned anew. Nothing before the scan: until then
        nobody knows what is durable already.
        """
        new = (frozenset(ranks), slots <= LEAST_SLOTS)
        if new == (self._ranks, self._waiting) or not self.committer.scanned:
            return
        self._ranks, self._waiting = new
        old = self.planner
        self.planner = PersistPlanner(self._ranks, old.grid, slots=slots)
        self.planner.counts = old.counts
        for rank in sorted(self._ranks):
            self._recall(rank)

    def plan_anew(self) -> None:
        """What was written may not be there any more: the next `plan_for` begins from what is."""
        self._ranks = frozenset()

    def _recall(self, rank: int) -> None:
        """Tell a new planner what is there of this rank."""
        for id, held in self.committer.shards.items():
            if rank in held:
                self._start(self.planner.written(rank, id))
        if self._keeper.rank(rank).settled:
            self.settled(rank)

    def settled(self, rank: int) -> None:
        """It is known now which images of this rank stay: they may be written."""
        if rank in self._ranks:
            for id in self._keeper.rank(rank).sealed():
                if not self.committer.ledger.is_dead(id):
                    self.sealed(rank, id)

    def sealed(self, rank: int, id: StepId) -> None:
        if rank in self._ranks and self.committer.ancestry.writes(id):
            self._start(self.planner.sealed(rank, id))

    def overwritten(self, rank: int, id: StepId) -> None:
        if rank in self._ranks:
            self._start(self.planner.overwritten(rank, id))

    def gone(self, rank: int) -> None:
        """The rank's trainer has ended."""
        if rank in self._ranks:
            self._start(self.planner.gone(rank))

    def forget(self, dead: Callable[[StepId], bool]) -> None:
        """A new epoch began."""
        self._start(self.planner.forget(dead))

    def flush(self, ids: Collection[StepId] | None = None, *, newest: int = 2) -> None:
        """Persist these steps, or the newest common ones, now."""
        self._start(self.planner.flush(ids, newest=newest))

    # --- asking ------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._writing and self.planner.idle

    @property
    def counts(self) -> PersistCounts:
        return self.planner.counts

    def busy(self, id: StepId) -> bool:
        """Whether this step is on its way to the volumes."""
        return id == self.planner.target or any(one == id for _, one in self._writing)

    # --- writing -----------------------------------------------------------------------------

    def _start(self, writes: Iterable[Write]) -> None:
        for write in writes:
            if (write.rank, write.id) not in self._writing:
                self._begin(write)

    def _begin(self, write: Write) -> None:
        found = self._keeper.rank(write.rank).find(write.id)
        if found is None:
            self._spawn(self._end(write, ok=False), f"unwritten {write.id}")
            return
        slot_set, index = found
        control = slot_set.files[index].control()
        # pinned before anything else can run: nobody may be given this slot meanwhile
        slot_set.table.pin(index)
        self._writing.add((write.rank, write.id))
        self._spawn(self._write(write, slot_set, index, control), f"write {write.id} {write.rank}")

    async def _write(
        self, write: Write, slot_set: SlotSet, index: int, control: ControlPage | None
    ) -> None:
        written = None
        table, file = slot_set.table, slot_set.files[index]
        try:
            if file.cut_off:
                warn("not persisted", rank=write.rank, step=str(write.id), reason=CUT_OFF)
            elif control is not None and control.id == write.id:
                fresh = await self._write_with_room(slot_set, index, control)
                if file.control() == control:
                    written = fresh
                else:
                    await self._distrust(fresh)
        except Exception as error:  # whatever it is: the planner must hear of the end
            if str(error) != self.trouble:  # what stands in the way of every step is said once
                warn("not persisted", rank=write.rank, step=str(write.id), reason=str(error))
            self.trouble, self.failed = str(error), write.id
            self.totals.failed += 1
        finally:
            table.unpin(index)
        if written is not None:
            self._count(write, written)
            self.committer.wrote(written.shard)
        # with nothing awaited since the pin was taken back: the next image is pinned before its
        # slot can be assigned
        await self._end(write, ok=written is not None)

    async def _write_with_room(
        self, slot_set: SlotSet, index: int, control: ControlPage
    ) -> Written:
        while True:
            evictions = self.committer.evictions.count
            try:
                return await self._write_once(slot_set, index, control)
            except NoSpaceError:
                size_bytes = slot_set.layout.size_bytes
                if not await self.committer.make_room(size_bytes, evictions=evictions):
                    raise

    async def _write_once(self, slot_set: SlotSet, index: int, control: ControlPage) -> Written:
        view = slot_set.files[index].view
        executor = self._executors[self.committer.volumes.lane(control.rank)]
        return await asyncio.get_running_loop().run_in_executor(
            executor, self.committer.volumes.write, view, slot_set.layout, control
        )

    async def _distrust(self, written: Written) -> None:
        warn("overwritten while it was written", path=str(written.shard.path))
        await self.committer.blocking(
            lambda: self.committer.volumes.quarantine(written.shard.path, "overwritten")
        )

    def _count(self, write: Write, written: Written) -> None:
        self.trouble = ""
        self.totals.bytes += written.shard.size_bytes
        self.totals.seconds += written.seconds
        self.totals.cpu_s += written.cpu_s
        say(
            "durable",
            rank=write.rank,
            step=str(write.id),
            bytes=written.shard.size_bytes,
            seconds=round(written.seconds, 4),
            level=logging.DEBUG,
        )

    async def _end(self, write: Write, *, ok: bool) -> None:
        if write.rank in self._ranks:
            self._start(self.planner.written(write.rank, write.id, ok=ok))
        self._changes.ring()
        try:
            if ok:
                await self.committer.refresh(grown=True)
        finally:
            self._writing.discard((write.rank, write.id))
            self._changes.ring()
