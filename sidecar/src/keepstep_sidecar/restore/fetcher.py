"""Asks the places of a saved shard, nearest first, until one gives a usable answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from keepstep.core.node import StepReadEvent
from keepstep.errors import ForeignError, ImageError, KeepstepError, NoMemoryError, StorageError
from keepstep.image import BaseRef, ControlPage, Layout
from keepstep.image.control_page import Manifest
from keepstep.steps import StepId
from keepstep_sidecar.commit.node_host import NodeHost
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.leases import Leases
from keepstep_sidecar.log import info
from keepstep_sidecar.memory.slot_allocator import SlotAllocator
from keepstep_sidecar.memory.slot_pool import PooledSlot, RankSlots, SlotPool, SlotSet
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.source import ReadCancellation, ShardSource

T = TypeVar("T")


@dataclass(eq=False)
class Fetcher:
    """Reads copies beyond memory. Of images in memory, which are mapped, only headers are read."""

    pool: SlotPool
    node_host: NodeHost
    threads: Executor
    _manifests: verified_chunks.Manifests = field(default_factory=verified_chunks.Manifests)

    def __post_init__(self) -> None:
        self._copies, self._remotes = self.node_host.copies, self.node_host.remotes

    async def ask_nearest_source(
        self, step_id: StepId, saved: int, question: Callable[[ShardSource], Awaitable[T]]
    ) -> tuple[ShardSource, T]:
        """The first place that can answer, and its answer. A copy that fails is not asked again.

        Raises the last place's error, or StorageError when there is no place.
        """
        failure: KeepstepError = StorageError(
            f"step {step_id}: no copy of rank {saved} is in reach"
        )
        tried: list[ShardSource] = []
        while (source := await self._next(step_id, saved, tried)) is not None:
            tried.append(source)
            try:
                return source, await question(source)
            except (ImageError, StorageError) as error:
                failure = error
                await self.node_host.reject_copy(source, error, step_id=step_id)
        raise failure

    async def _next(
        self, step_id: StepId, saved: int, tried: Collection[ShardSource]
    ) -> ShardSource | None:
        """The next place to ask. Remote tiers are listed only if nothing that is known is left."""
        left = [
            origin
            for origin in self._copies.sources_of_shard(step_id, saved)
            if origin not in tried
        ]
        if not left and not self._remotes.scanned:
            await self.node_host.refresh_remotes()
            left = [
                origin
                for origin in self._copies.sources_of_shard(step_id, saved)
                if origin not in tried
            ]
        return left[0] if left else None

    async def run_with_source(
        self, source: ShardSource, work: Callable[[verified_chunks.OpenSource], T]
    ) -> T:
        """Run `work` on a thread, with the source open. Raises StorageError, ImageError."""

        def opened(cancel: ReadCancellation) -> T:
            with verified_chunks.open_verified(source, cancel, self._manifests) as found:
                return work(found)

        return await verified_chunks.run_cancellable(self.threads, opened)

    async def load(self, source: ShardSource, view: memoryview) -> ControlPage:
        """Load the whole image into a slot, verified, seal last. Raises StorageError,
        ImageError."""
        return await verified_chunks.run_cancellable(
            self.threads,
            lambda cancel: verified_chunks.load_image(
                source, view, cancel=cancel, manifests=self._manifests
            ),
        )

    async def manifest(self, source: ShardSource) -> Manifest:
        """The manifest, against which each chunk is verified."""
        if (known := self._manifests.get_cached_manifest(source)) is not None:
            return known
        return await self.run_with_source(source, lambda opened: opened.manifest)

    async def layout(self, step_id: StepId, saved: int) -> Layout:
        """The layout of the saved rank's image, or of a base by its number. Raises as
        `ask_nearest_source` does."""
        if (at := self._in_memory(step_id, saved)) is not None:
            return at.layout
        return (await self.ask_nearest_source(step_id, saved, self.manifest))[1].layout

    def _in_memory(self, step_id: StepId, number: int) -> PooledSlot | None:
        world = self._copies.world_of(step_id) or 0
        if not 0 < world <= number:
            return self.pool.find(number, step_id)
        at = self.pool.find(number - world, step_id)
        return None if at is None else self.pool.find_base_slot(at)


# --- before a trainer asks -------------------------------------------------------------------


@dataclass(eq=False)
class MemoryImageLoader:
    """Reads each image only once, even if several callers ask for it meanwhile."""

    pool: SlotPool
    node_host: NodeHost
    fetcher: Fetcher
    _: KW_ONLY
    changes: ChangeNotifier
    allocator: SlotAllocator
    leases: Leases
    agreed: dict[int, StepId] = field(default_factory=dict)
    """For each rank, the step that all ranks have agreed to restore."""
    _loading: dict[tuple[int, StepId], asyncio.Task[None]] = field(default_factory=dict)
    _bases: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._restart = self.node_host.restart

    async def bring_image(self, step_id: StepId, rank: int) -> None:
        """Return when the image is in a slot of its rank. A copy that fails is no candidate any
        more.

        Raises ImageError or StorageError (from the last place), NoMemoryError.
        """
        key = (rank, step_id)
        if (task := self._loading.get(key)) is None:
            task = asyncio.create_task(self._bring(step_id, rank), name=f"load {step_id} {rank}")
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(task)

    async def _bring(self, step_id: StepId, rank: int) -> None:
        if self.pool.rank(rank).find(step_id) is None:
            await self.fetcher.ask_nearest_source(step_id, rank, self._load)

    async def _load(self, source: ShardSource) -> None:
        slots = self.pool.rank(source.shard.rank)
        step_id, layout = source.shard.step_id, (await self.fetcher.manifest(source)).layout
        slot = await self._reserve(slots, layout, step_id)
        while slot.file.describe_damage():  # removed by others meanwhile
            slot.finish_filling()
            slot.slot_set.discard_slot(slot.index)
            slot = await self._reserve(slots, layout, step_id)
        self.node_host.feed(StepReadEvent(step_id, begins=True))
        started = time.monotonic()
        try:
            control = await self.fetcher.load(source, slot.file.view)
            if control.base is not None:
                await self._load_base(slots, source, control.base)
        except BaseException:
            slot.file.invalidate_image()
            slot.finish_filling()
            self.changes.ring()  # others may wait for it
            raise
        finally:
            self.node_host.feed(StepReadEvent(step_id, begins=False))
        slot.seal(control.step_id, tier=source.tier)
        slots.register_base_reference(slot, control)
        info(
            "restore.shard_loaded",
            rank=source.shard.rank,
            step=str(step_id),
            tier=str(source.tier),
            size_bytes=layout.size_bytes,
            duration_s=round(time.monotonic() - started, 4),
        )
        self.changes.ring()

    async def _load_base(self, slots: RankSlots, source: ShardSource, ref: BaseRef) -> None:
        """Bring the base to which the image of `source` refers, if it is not in memory."""
        async with self._bases:  # several images refer to one
            if slots.bases.find(ref) is None:
                await self._read_base(slots, source, ref)

    async def _read_base(self, slots: RankSlots, source: ShardSource, ref: BaseRef) -> None:
        step_id, beside = source.shard.step_id, source.beside
        if beside is None:
            raise StorageError(
                f"step {step_id}, rank {source.shard.rank}: its base is not in reach"
            )
        manifest = await self.fetcher.manifest(beside)
        if manifest.layout.id != ref.layout:
            raise ForeignError("another base than the step refers to", path=beside.where)
        slot = await self.allocator.allocate_base_slot(slots, manifest.layout)
        try:
            await self.fetcher.load(beside, slot.file.view)
        except BaseException:
            self.pool.unlink([slot.slot_set.abandon_slot(slot.index)])
            slot.slot_set.target = slot.slot_set.count
            raise
        slot.seal(ref.step, tier=beside.tier)

    async def _reserve(self, slots: RankSlots, layout: Layout, step_id: StepId) -> PooledSlot:
        """A slot of the shard's layout that holds no candidate. Waits while one is being made."""
        slot_set = slots.slot_sets.setdefault(layout.id, SlotSet(layout))
        slots.world = slots.world or layout.world
        slot_set.failure = ""  # memory may be free by now
        index: int | None = None

        def reserved() -> bool:
            nonlocal index
            if overtaken():
                return True
            index = slot_set.table.reserve_slot_for_load(self._expendable(slots))
            if index is None and not slot_set.failure:
                self.allocator.order_restore_slot(slots, slot_set)
            hopeless = slot_set.target == 0 and self.leases.of(slots.rank) is None
            return index is not None or bool(slot_set.failure) or hopeless

        def overtaken() -> bool:
            """Whether this is a prefetch, and the ranks have agreed on another step meanwhile, or
            train already."""
            trains = not self.leases.is_rank_awaiting_restore(slots.rank)
            return self.agreed.get(slots.rank, None if trains else step_id) != step_id

        await self.changes.until(reserved, timeout_s=600.0)
        if index is None and overtaken():
            agreed = self.agreed.get(slots.rank)
            does = "trains already" if agreed is None else f"restores step {agreed}, not {step_id}"
            text = f"rank {slots.rank} {does}"
            raise NoMemoryError(text, code="no-slot")
        if index is None:
            why = slot_set.failure or f"{layout.size_bytes} bytes do not fit beside what is there"
            raise NoMemoryError(
                f"rank {slots.rank}: no slot to read step {step_id} into: {why}; raise"
                " --memory-limit",
                code="no-slot",
            )
        return PooledSlot(slot_set, index)

    def _expendable(self, slots: RankSlots) -> set[StepId]:
        """Images for which no rank will vote: older than the planned step, or not whole.

        If other ranks are on other machines, it is not known here what is whole. But once all ranks
        have agreed on a step, a newer step is not held by all.
        """
        sealed = slots.list_sealed_steps()
        agreed = self.agreed.get(slots.rank)
        beyond = {step_id for step_id in sealed if agreed is not None and step_id > agreed}
        ledger = self.node_host.get_current_ledger()
        if (planned := self._restart.plan()) is None:
            return beyond
        whole = set(ledger.list_reachable_steps())
        unlike = {step_id for step_id in sealed if step_id not in whole and planned.id in whole}
        # The agreed step counts, not the plan: a prefetch may still wait for a slot.
        return ({step_id for step_id in sealed if step_id < planned.id} | unlike | beyond) - {
            agreed
        }
