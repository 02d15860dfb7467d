"""Makes slots in the background: the first slot of every rank before the second of any rank.

Touching pages takes seconds per GiB, so it happens on threads of low priority, never on the event
loop. A slot can be used as soon as it is ready; the others follow.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keepstep.errors import NoMemoryError
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.memory.slot_directories import SlotDirectories, entered
from keepstep_sidecar.memory.slot_file import (
    SlotFile,
    lower_priority,
    slot_name,
    slot_number,
)
from keepstep_sidecar.memory.slot_pool import SlotSet

_MOST_THREADS = 4
_FIRST_HUGE = 100_000_000
"""Slot numbers on huge pages begin here. Otherwise a life that does not see these slots would reuse
their names."""
_log = logging.getLogger("keepstep.sidecar")


class Allocator:
    """Fills slot sets up to their `wanted` slots. `run` is its worker, one task per thread."""

    def __init__(self, directories: SlotDirectories, changes: Changes) -> None:
        self.threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._directories = directories
        self._changes = changes
        self._stop = threading.Event()
        self._numbers = itertools.count(1)
        self._queue: asyncio.PriorityQueue[tuple[int, int, SlotSet | SlotFile]] = (
            asyncio.PriorityQueue()
        )
        self._making: dict[int, int] = {}
        self._names: set[Path] = set()
        """Paths of the slots that are being made."""
        self._executor = ThreadPoolExecutor(
            self.threads, thread_name_prefix="slots", initializer=lower_priority
        )

    def fill(self, slot_set: SlotSet) -> None:
        """Order the slots that this slot set lacks."""
        ordered = self._making.get(id(slot_set), 0)
        for position in range(slot_set.count + ordered, slot_set.wanted):
            self._making[id(slot_set)] = self._making.get(id(slot_set), 0) + 1
            self._queue.put_nowait((position, next(self._numbers), slot_set))

    def grow(self, slot_set: SlotSet, *, most: int) -> None:
        """Order one more slot, unless one is on its way or there are `most`."""
        if slot_set.count >= slot_set.wanted and slot_set.wanted < most:
            slot_set.wanted += 1
            self.fill(slot_set)

    def settle(self, file: SlotFile) -> None:
        """Map and lock an adopted slot, after all other orders."""
        self._queue.put_nowait((1 << 30, next(self._numbers), file))

    async def run(self) -> None:
        """Work until cancelled or stopped. An order that fails does not end the worker."""
        while not self._stop.is_set():
            _, _, order = await self._queue.get()
            try:
                await self._carry_out(order)
            except Exception:
                _log.exception("slot order failed")

    async def _carry_out(self, order: SlotSet | SlotFile) -> None:
        if isinstance(order, SlotFile):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, order.settle)
        else:
            await self._make(order)

    async def _make(self, slot_set: SlotSet) -> None:
        layout = slot_set.layout
        try:
            if slot_set.count >= slot_set.wanted:  # the layout was dropped, or has enough
                return
            file = await self._create(slot_set)
        except FileNotFoundError as error:  # the directory was removed: see `Service.mend_memory`
            warn("slot not made", rank=layout.rank, reason=str(error))
            return
        except (NoMemoryError, OSError) as error:
            slot_set.failure = str(error)
            slot_set.wanted = slot_set.count
            warn("slot not made", rank=layout.rank, reason=str(error))
            return
        finally:
            self._making[id(slot_set)] -= 1
            if not self._making[id(slot_set)]:
                del self._making[id(slot_set)]
            self._changes.ring()
        given_up = file.huge and self._directories.huge is None
        if slot_set.count >= slot_set.wanted or given_up:
            file.unlink()  # the layout was dropped meanwhile, or trainers do not see huge pages
            self.fill(slot_set)
            return
        slot_set.add(file)
        say(
            "slot made",
            rank=layout.rank,
            slot=file.name,
            bytes=len(file.view),
            locked=not file.locked,
            huge=file.huge,
        )
        self._changes.ring()

    async def _create(self, slot_set: SlotSet) -> SlotFile:
        """Make a slot: of huge pages while there are enough, else of small pages."""
        rank, size_bytes = slot_set.layout.rank, slot_set.layout.size_bytes
        small, huge = self._directories.for_slot(rank, size_bytes)
        if huge is not None:
            try:
                return await self._create_in(huge, slot_set, first=_FIRST_HUGE)
            except (NoMemoryError, OSError) as error:  # others were faster, or a limit is lower
                say("not on huge pages", rank=rank, reason=str(error))
                self._directories.require_small(size_bytes)
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
        with entered(directory) as fd:
            names |= {name.removesuffix(".new") for name in os.listdir(fd)}
        taken = {slot_number(name) for name in names}
        return slot_name(slot_set.layout, next(n for n in itertools.count(first) if n not in taken))

    def stop(self) -> None:
        """Give up the slots that are being made. For the end of the process."""
        self._stop.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
