"""Brings a rank's own image into a slot, verified, from the nearest place that has it whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from keepstep.errors import NoMemoryError
from keepstep.image import Layout
from keepstep.steps import StepId
from keepstep_sidecar.bank import Bank
from keepstep_sidecar.catalog import Catalog
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.journal import say
from keepstep_sidecar.nearest import Nearest
from keepstep_sidecar.origins import Origin
from keepstep_sidecar.planning import plan
from keepstep_sidecar.slotkeeper import RankSlots, Slotkeeper


class Loader:
    """Each image is read once, whoever asks for it meanwhile."""

    def __init__(
        self,
        keeper: Slotkeeper,
        catalog: Catalog,
        nearest: Nearest,
        *,
        changes: Changes,
        grow: Callable[[RankSlots, Bank], None],
        leased: Callable[[int], bool],
    ) -> None:
        """`grow`: orders one more slot, where memory allows it. `leased`: whether a rank's trainer
        is here, for which it is worth to wait for memory."""
        self.agreed: dict[int, StepId] = {}
        """Per rank, the step that all ranks have agreed to restore."""
        self._keeper = keeper
        self._catalog = catalog
        self._nearest = nearest
        self._changes = changes
        self._grow = grow
        self._leased = leased
        self._loading: dict[tuple[int, StepId], asyncio.Task[None]] = {}

    async def bring(self, id: StepId, rank: int) -> None:
        """Return when the image is in a slot of its rank. A copy that fails is a candidate no more.

        Raises ImageError, StorageError (the last place's), NoMemoryError.
        """
        key = (rank, id)
        if (task := self._loading.get(key)) is None:
            task = asyncio.create_task(self._bring(id, rank), name=f"load {id} {rank}")
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(task)

    async def _bring(self, id: StepId, rank: int) -> None:
        if self._keeper.rank(rank).find(id) is None:
            await self._nearest.ask(id, rank, self._load)

    async def _load(self, origin: Origin) -> None:
        slots = self._keeper.rank(origin.rank)
        layout = await origin.layout()
        bank, index = await self._reserve(slots, layout, origin.id)
        while bank.files[index].lacks():  # removed by others in the meantime
            bank.table.release(index)
            bank.lose(index)
            bank, index = await self._reserve(slots, layout, origin.id)
        self._catalog.opening(origin.id, on=True)
        started = time.monotonic()
        try:
            control = await origin.load(bank.files[index].view)
        except BaseException:
            bank.table.release(index)
            raise
        finally:
            self._catalog.opening(origin.id, on=False)
        bank.seal(index, control.id, tier=origin.tier)
        say(
            "loaded",
            rank=origin.rank,
            step=str(origin.id),
            tier=str(origin.tier),
            bytes=origin.bytes,
            seconds=round(time.monotonic() - started, 4),
        )
        self._changes.ring()

    async def _reserve(self, slots: RankSlots, layout: Layout, id: StepId) -> tuple[Bank, int]:
        """A slot of the shard's layout that holds no candidate; waits while one is being made."""
        bank = slots.banks.setdefault(layout.id, Bank(layout))
        slots.world = slots.world or layout.world
        index: int | None = None

        def reserved() -> bool:
            nonlocal index
            index = bank.table.reserve(self._expendable(slots))
            if index is None and not bank.failure:
                self._grow(slots, bank)
            hopeless = bank.wanted == 0 and not self._leased(slots.rank)
            return index is not None or bool(bank.failure) or hopeless or overtaken()

        def overtaken() -> bool:
            """A prefetch, and the ranks have agreed on another step meanwhile."""
            return self.agreed.get(slots.rank, id) != id

        await self._changes.until(reserved, timeout_s=600.0)
        if index is None and overtaken():
            text = f"rank {slots.rank} restores step {self.agreed[slots.rank]}, not {id}"
            raise NoMemoryError(text, code="no-slot")
        if index is None:
            why = bank.failure or f"{layout.size_bytes} bytes do not fit beside what is there"
            raise NoMemoryError(
                f"rank {slots.rank}: no slot to read step {id} into: {why}; raise --memory-limit",
                code="no-slot",
            )
        return bank, index

    def _expendable(self, slots: RankSlots) -> set[StepId]:
        """Images that no rank will vote for: older than the planned step, or not whole.

        Where other ranks are elsewhere nobody here knows what is whole; but once all have agreed on
        a step, a newer one is not held by all.
        """
        sealed = slots.sealed()
        agreed = self.agreed.get(slots.rank)
        beyond = {id for id in sealed if agreed is not None and id > agreed}
        if (planned := plan(self._catalog)) is None:
            return beyond
        whole = set(self._catalog.ledger.whole())
        unlike = {id for id in sealed if id not in whole and planned.id in whole}
        # what was agreed on counts, not the plan: a prefetch may still wait for a slot
        return ({id for id in sealed if id < planned.id} | unlike | beyond) - {agreed}
