"""Makes slots in the background: the first slot of every rank before the second of any rank.

Touching pages takes seconds per GiB, so it happens on threads of low priority, never on the event
loop. A slot can be used as soon as it is ready; the others follow.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.errors import NoMemoryError
from keepstep.image import Layout
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.error_responses import refusal_error
from keepstep_sidecar.leases import Lease, Leases, serves_all_ranks
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.memory.slot_directories import open_rank_directory
from keepstep_sidecar.memory.slot_file import (
    SlotFile,
    lower_priority,
    slot_name,
    slot_number,
)
from keepstep_sidecar.memory.slot_pool import PooledSlot, RankSlots, SlotPool, SlotSet

_MOST_THREADS = 4
_FIRST_HUGE = 100_000_000
"""Slot numbers on huge pages begin here. Otherwise a life that does not see these slots would reuse
their names."""
LEAST_SLOTS = 2
"""With fewer, an image is overwritten before the next one is complete."""
SLOTS = 4
"""Images of a rank that shares its run with ranks of other machines."""
SLOTS_ON_ONE_MACHINE = 3
"""Images of a rank if this sidecar knows what all ranks have sealed. See `core.slot_table`."""
_KEPT_OF_GONE = 2
"""Images of a rank that trains here no more, until the run has restored: of its newest two steps,
one is common to all ranks."""


@dataclass(eq=False, kw_only=True)
class SlotAllocator:
    """Decides how many slots there are (`SlotSet.target`), and makes them. Memory limit and tmpfs
    space are divided among this machine's ranks. `run` is its worker, one task per thread."""

    config: Config
    pool: SlotPool
    leases: Leases
    changes: ChangeNotifier
    threads: int = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    _stop: threading.Event = field(default_factory=threading.Event)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _queue: asyncio.PriorityQueue[tuple[int, int, SlotSet | SlotFile]] = field(
        default_factory=asyncio.PriorityQueue
    )
    _making: Counter[int] = field(default_factory=Counter)
    """How many slots are ordered, by the id of their set."""
    _names: set[Path] = field(default_factory=set)
    """Paths of the slots that are being made."""

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(
            self.threads, thread_name_prefix="slots", initializer=lower_priority
        )

    # --- making ------------------------------------------------------------------------------

    def fill(self, slot_set: SlotSet) -> None:
        """Order the slots that this slot set lacks."""
        for position in range(slot_set.count + self._making[id(slot_set)], slot_set.needed_count):
            self._making[id(slot_set)] += 1
            self._queue.put_nowait((position, next(self._numbers), slot_set))

    def make_last(self, slot_set: SlotSet) -> None:
        """Order the slot that was postponed, because a reader is in the way of the next step."""
        slot_set.postponed = False
        self.fill(slot_set)

    def queue_adopted_slot(self, file: SlotFile) -> None:
        """Map and lock an adopted slot, after all other orders."""
        self._queue.put_nowait((1 << 30, next(self._numbers), file))

    async def run(self) -> None:
        """Work until cancelled, stopped or an error. The order that met the error is repeated."""
        while not self._stop.is_set():
            _, _, order = await self._queue.get()
            if isinstance(order, SlotFile):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._executor, order.map_and_lock_pages)
                continue
            try:
                await self._make(order)
            except Exception:
                self.fill(order)  # without this slot its rank may wait for ever
                raise

    async def _make(self, slot_set: SlotSet) -> None:
        layout = slot_set.layout
        try:
            if slot_set.count >= slot_set.needed_count:  # the layout was dropped, or has enough
                return
            file = await self._create(slot_set)
        except FileNotFoundError as error:  # the directory was removed: see `Service.repair_memory`
            warn("slot.allocation_failed", rank=layout.rank, error=str(error))
            return
        except (NoMemoryError, OSError) as error:
            slot_set.failure = str(error)
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                limit = (
                    f"a slot has {layout.size_bytes} bytes; raise the limit on files (ulimit -f)"
                )
                slot_set.failure = f"{error}: {limit}"
            slot_set.target = slot_set.count + self._making[id(slot_set)] - 1
            warn("slot.allocation_failed", rank=layout.rank, error=str(error))
            return
        finally:
            self._making[id(slot_set)] -= 1
            self._making += Counter()  # without those of which none is ordered
            self.changes.ring()
        given_up = file.huge and self.pool.directories.huge is None
        if slot_set.count >= slot_set.needed_count or given_up:
            file.unlink()  # the layout was dropped meanwhile, or trainers do not see huge pages
            self.fill(slot_set)
            return
        slot_set.add(file)
        info(
            "slot.allocated",
            rank=layout.rank,
            slot=file.name,
            size_bytes=len(file.view),
            locked=not file.locked,
            huge=file.huge,
        )
        self.changes.ring()

    async def _create(self, slot_set: SlotSet) -> SlotFile:
        """Make a slot: of huge pages while there are enough, else of small pages."""
        rank, size_bytes = slot_set.layout.rank, slot_set.layout.size_bytes
        small, huge = self.pool.directories.directories_for_slot(rank, size_bytes)
        if huge is not None:
            try:
                return await self._create_in(huge, slot_set, first=_FIRST_HUGE)
            except (NoMemoryError, OSError) as error:  # others were faster, or a limit is lower
                info("slot.small_pages_used", rank=rank, error=str(error))
                self.pool.directories.check_room_on_small_pages(size_bytes)
        return await self._create_in(small, slot_set, first=0)

    async def _create_in(self, directory: Path, slot_set: SlotSet, *, first: int) -> SlotFile:
        layout, loop = slot_set.layout, asyncio.get_running_loop()
        path = directory / self._free_name(directory, slot_set, first=first)
        self._names.add(path)
        try:
            return await loop.run_in_executor(
                self._executor, lambda: SlotFile.create(path, layout, stop=self._stop)
            )
        finally:
            self._names.discard(path)

    def _free_name(self, directory: Path, slot_set: SlotSet, *, first: int) -> str:
        # A name is used only once: a trainer may still have mapped the slot that had it before.
        names = {*(file.name for file in slot_set.files), *slot_set.orphans}
        names |= {path.name for path in self._names if path.parent == directory}
        with open_rank_directory(directory) as fd:
            names |= {name.removesuffix(".new") for name in os.listdir(fd)}
        taken = {slot_number(name) for name in names}
        return slot_name(slot_set.layout, next(n for n in itertools.count(first) if n not in taken))

    def stop(self) -> None:
        """Give up the slots that are being made. For the end of the process."""
        self._stop.set()
        self._executor.shutdown(wait=True, cancel_futures=True)

    # --- how many ----------------------------------------------------------------------------

    def target_slots(self, lease: Lease | None) -> int:
        """How many images of a rank shall be in memory, if there is room."""
        if self.config.slots is not None:
            return self.config.slots
        return (
            SLOTS_ON_ONE_MACHINE if lease is not None and serves_all_ranks(lease.request) else SLOTS
        )

    def set_slot_count(self, slots: RankSlots, slot_set: SlotSet, lease: Lease) -> str:
        """Set the number of slots; fewer than configured as long as images of ranks that are gone
        take the memory. If need be, slots of older layouts are given up. If no person chose their
        number, the last one is postponed: the others suffice while the drive writes an image within
        a step. Returns a warning when there are fewer than configured, else "".

        Raises NoMemoryError when not one fits; SidecarError `memory-busy` when more will, once
        images of former layouts are on the drive.
        """
        size_bytes, target = slot_set.layout.size_bytes, self.target_slots(lease)
        others = [other for other in slots.slot_sets.values() if other is not slot_set]
        # once: slots that are given up below have no names any more, but still take their memory
        total_bytes = self._total_bytes(size_bytes)

        def affordable(beside: list[SlotSet]) -> int:
            taken_bytes = (
                sum(slot_set.target_size_bytes for slot_set in beside) + slots.bases.size_bytes
            )
            left = self._share_bytes(lease, total_bytes) - taken_bytes
            return max(0, min(target, left // size_bytes))

        count = affordable(others)
        newest = max(slots.list_sealed_steps(), default=None)
        least = min(LEAST_SLOTS, target)
        for keep, enough in ((2, target), (1, least), (0, least)):
            if count >= enough:
                continue
            for other in others:
                if keep or newest not in other.table.list_sealed_steps():
                    self.pool.unlink(other.give_up_slots(keep=keep))
            self.pool.unlink(slots.free_unused_bases())
            if lease.training or keep == _KEPT_OF_GONE:
                self._give_up_gone(lease, keep=keep)
            count = affordable(others)
        if count < least <= affordable([]):
            raise refusal_error(
                "memory-busy", "images of a former layout are on their way to the drive"
            )
        warning = self._shortage(lease, total_bytes, size_bytes, count)
        slot_set.failure = ""
        slot_set.target = max(count, slot_set.count)
        slot_set.postponed = self.config.slots is None and count == target
        slot_set.shared_run = not serves_all_ranks(lease.request)
        if warning:
            warn("slot.count_reduced", rank=slots.rank, slots=count, reason=warning)
        return warning

    def _shortage(self, lease: Lease, total_bytes: int, slot_bytes: int, count: int) -> str:
        """The warning about fewer slots than configured; "" when there are enough. Raises
        NoMemoryError when not one fits."""
        target, ranks = self.target_slots(lease), _ranks(lease)
        if count >= target:
            return ""
        there = self._share_bytes(lease, total_bytes) * ranks
        asked = (
            f"{target} slots of {slot_bytes} bytes for each of {ranks} ranks need"
            f" {target * slot_bytes * ranks} bytes, but there are {there}"
        )
        if not count:
            raise NoMemoryError(
                f"{asked}: not one fits; raise --memory-limit or give the machine more shared"
                " memory",
                code="no-memory",
            )
        risk = "after a crash, ranks may have no step in common in memory"
        if count == LEAST_SLOTS:
            risk = "every staged step waits to be persisted"
        elif count < LEAST_SLOTS:
            risk = "a step is staged once the one before it is durable, and replaces it in memory"
        return f"{asked}: {count} slots instead, so {risk}; raise --memory-limit"

    def order_restore_slot(self, slots: RankSlots, slot_set: SlotSet) -> None:
        """Order one more slot to restore into, unless one is already on its way or none fits."""
        most = self._most(slots, slot_set, self.leases.of(slots.rank))
        if slot_set.count < slot_set.needed_count:
            if not self.pool.directories.is_directory_missing(slots.rank):  # made again soon
                self.fill(slot_set)  # one may have been given up since it was ordered
            return
        if slot_set.postponed:
            self.make_last(slot_set)
        elif (beside := max(slot_set.target, slot_set.count)) < most:
            slot_set.target = beside + 1
            self.fill(slot_set)

    async def allocate_base_slot(self, slots: RankSlots, layout: Layout) -> PooledSlot:
        """A new slot to read a base of this layout into. Raises NoMemoryError."""
        size_bytes = layout.size_bytes
        if self._total_bytes(size_bytes) - self.pool.made_bytes < size_bytes:
            text = f"rank {slots.rank}: {size_bytes} bytes for its base do not fit beside what is"
            raise NoMemoryError(f"{text} there; raise --memory-limit", code="no-slot")
        slot_set = slots.bases.sets.setdefault(layout.id, SlotSet(layout))
        slot_set.failure = ""  # memory may be free by now
        index: int | None = None

        def reserved() -> bool:
            """Bases are given up when a trainer comes or stages, also those that are being made."""
            nonlocal slot_set, index
            slot_set = slots.bases.sets.setdefault(layout.id, slot_set)
            index = slot_set.table.reserve_slot_for_load()
            trains = not self.leases.is_rank_awaiting_restore(slots.rank)
            if index is not None or slot_set.failure or trains:
                return True
            if not self._making[id(slot_set)] and not self.pool.directories.is_directory_missing(
                slots.rank
            ):
                slot_set.target = slot_set.count + 1
                self.fill(slot_set)
            return False

        await self.changes.until(reserved, timeout_s=600.0)
        if index is None:
            raise NoMemoryError(slot_set.failure or "no base was made in time", code="no-slot")
        return PooledSlot(slot_set, index)

    def _most(self, slots: RankSlots, slot_set: SlotSet, lease: Lease | None) -> int:
        """How many slots this set may have for a restore: one more than usual, if it fits."""
        size_bytes = slot_set.layout.size_bytes
        total_bytes = self._total_bytes(size_bytes)
        if lease is None:  # it is unknown which trainers come, if any: only see whether images fit
            others = self.pool.made_bytes - sum(
                len(file.view) for _, file in slot_set.iterate_files_without_orphans()
            )
            return min(self.target_slots(lease), (total_bytes - others) // size_bytes)
        taken = slots.reserved_bytes - slot_set.target_size_bytes

        def affordable(lease: Lease) -> int:
            left = self._share_bytes(lease, total_bytes) - taken
            return max(0, min(self.target_slots(lease) + 1, left // size_bytes))

        if not affordable(lease):
            self._give_up_gone(lease, keep=_KEPT_OF_GONE)
        return affordable(lease)

    def _give_up_gone(self, lease: Lease, *, keep: int) -> None:
        """Free slots of ranks that train here no more, without the newest `keep` images of each."""
        for slot_set in self.pool.list_departed_slot_sets(lease.world):
            self.pool.unlink(slot_set.give_up_slots(keep=keep))

    def _share_bytes(self, lease: Lease, total_bytes: int) -> int:
        """What each rank may take. It is fixed, so that the first rank leaves room for the last."""
        gone = sum(
            slot_set.target_size_bytes
            for slot_set in self.pool.list_departed_slot_sets(lease.world)
        )
        return max(0, total_bytes - gone) // _ranks(lease)

    def _total_bytes(self, slot_bytes: int) -> int:
        there = self.pool.directories.free_bytes(slot_bytes) + self.pool.made_bytes
        limit = self.config.memory_limit_bytes
        return there if limit is None else min(limit, there)


def _ranks(lease: Lease) -> int:
    """How many ranks this machine has."""
    return max(1, lease.request.local_world or lease.world)
