"""Brings a rank's own image into a slot, verified, from the nearest place that has it whole. It
also does so before a trainer asks, when it is clear which step will be restored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from keepstep.core.node import Reading
from keepstep.errors import NoMemoryError
from keepstep.image import Layout
from keepstep.steps import StepId
from keepstep_sidecar.commit.committer import Committer
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.log import say
from keepstep_sidecar.memory.slot_pool import RankSlots, Slot, SlotPool, SlotSet
from keepstep_sidecar.restore.fetch import Fetcher
from keepstep_sidecar.tiers.source import ShardSource


class Prefetcher:
    """Reads each image only once, even if several callers ask for it meanwhile."""

    def __init__(
        self,
        pool: SlotPool,
        committer: Committer,
        fetcher: Fetcher,
        *,
        changes: Changes,
        grow: Callable[[RankSlots, SlotSet], None],
        leased: Callable[[int], bool],
    ) -> None:
        """`grow`: orders one more slot if memory allows it. `leased`: whether a rank's trainer is
        here, for which it is worth waiting for memory."""
        self.agreed: dict[int, StepId] = {}
        """For each rank, the step that all ranks have agreed to restore."""
        self._pool = pool
        self._committer = committer
        self._restart = committer.restart
        self._fetcher = fetcher
        self._changes = changes
        self._grow = grow
        self._leased = leased
        self._loading: dict[tuple[int, StepId], asyncio.Task[None]] = {}

    async def bring(self, id: StepId, rank: int) -> None:
        """Return when the image is in a slot of its rank. A copy that fails is no candidate any
        more.

        Raises ImageError or StorageError (from the last place), NoMemoryError.
        """
        key = (rank, id)
        if (task := self._loading.get(key)) is None:
            task = asyncio.create_task(self._bring(id, rank), name=f"load {id} {rank}")
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(task)

    async def _bring(self, id: StepId, rank: int) -> None:
        if self._pool.rank(rank).find(id) is None:
            await self._fetcher.ask(id, rank, self._load)

    async def _load(self, source: ShardSource) -> None:
        slots = self._pool.rank(source.shard.rank)
        id, layout = source.shard.step_id, (await self._fetcher.manifest(source)).layout
        slot = await self._reserve(slots, layout, id)
        while slot.file.lacks():  # removed by others meanwhile
            slot.release()
            slot.slot_set.lose(slot.index)
            slot = await self._reserve(slots, layout, id)
        self._committer.feed(Reading(id, begins=True))
        started = time.monotonic()
        try:
            control = await self._fetcher.load(source, slot.file.view)
        except BaseException:
            slot.release()
            raise
        finally:
            self._committer.feed(Reading(id, begins=False))
        slot.seal(control.id, tier=source.tier)
        say(
            "loaded",
            rank=source.shard.rank,
            step=str(id),
            tier=str(source.tier),
            bytes=layout.size_bytes,
            seconds=round(time.monotonic() - started, 4),
        )
        self._changes.ring()

    async def _reserve(self, slots: RankSlots, layout: Layout, id: StepId) -> Slot:
        """A slot of the shard's layout that holds no candidate. Waits while one is being made."""
        slot_set = slots.slot_sets.setdefault(layout.id, SlotSet(layout))
        slots.world = slots.world or layout.world
        index: int | None = None

        def reserved() -> bool:
            nonlocal index
            index = slot_set.table.reserve(self._expendable(slots))
            if index is None and not slot_set.failure:
                self._grow(slots, slot_set)
            hopeless = slot_set.wanted == 0 and not self._leased(slots.rank)
            return index is not None or bool(slot_set.failure) or hopeless or overtaken()

        def overtaken() -> bool:
            """Whether this is a prefetch and the ranks have agreed on another step meanwhile."""
            return self.agreed.get(slots.rank, id) != id

        await self._changes.until(reserved, timeout_s=600.0)
        if index is None and overtaken():
            text = f"rank {slots.rank} restores step {self.agreed[slots.rank]}, not {id}"
            raise NoMemoryError(text, code="no-slot")
        if index is None:
            why = slot_set.failure or f"{layout.size_bytes} bytes do not fit beside what is there"
            raise NoMemoryError(
                f"rank {slots.rank}: no slot to read step {id} into: {why}; raise --memory-limit",
                code="no-slot",
            )
        return Slot(slot_set, index)

    def _expendable(self, slots: RankSlots) -> set[StepId]:
        """Images for which no rank will vote: older than the planned step, or not whole.

        If other ranks are on other machines, it is not known here what is whole. But once all ranks
        have agreed on a step, a newer step is not held by all.
        """
        sealed = slots.sealed()
        agreed = self.agreed.get(slots.rank)
        beyond = {id for id in sealed if agreed is not None and id > agreed}
        ledger = self._committer.look()
        if (planned := self._restart.plan()) is None:
            return beyond
        whole = set(ledger.whole())
        unlike = {id for id in sealed if id not in whole and planned.id in whole}
        # The agreed step counts, not the plan: a prefetch may still wait for a slot.
        return ({id for id in sealed if id < planned.id} | unlike | beyond) - {agreed}
