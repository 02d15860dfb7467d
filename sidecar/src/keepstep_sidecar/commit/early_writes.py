"""Begins to write large images while their trainer still copies them (docs/adr/0014).

Only images in slots of huge pages: with small pages, the drive's access to each page takes so much
CPU from the copy that nothing is gained. The node decides which images are written early, and when
that is no longer wanted (`Stop`). Nothing of an image that was never sealed stays on a drive.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from keepstep.core.node import Copied, Event, Overwritten
from keepstep.core.persist_planner import Write
from keepstep.errors import NoSpaceError
from keepstep.image import LEAST_ANNOUNCED_BYTES, ControlPage, Copying
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.memory.slot_file import SlotFile
from keepstep_sidecar.memory.slot_pool import Slot, SlotPool
from keepstep_sidecar.volume.volume_set import VolumeSet
from keepstep_sidecar.volume.writer import EarlyWrite

T = TypeVar("T")

_LOOK_S = 0.02
"""How often to check whether a copy has begun. One of 2 GiB takes eight times as long."""

_POLL_S = 0.002
_PATIENCE_S = 0.05
"""A copy that takes longer for one chunk stands still, and the drive is free for others."""

_IDLE_S = 1.0


class OnDrive(Protocol):
    """Runs a blocking call on the thread of the volume of this rank."""

    async def __call__(self, rank: int, work: Callable[[], T]) -> T: ...


class EarlyWrites:
    """Follows copies. `unsealed`: early writes of images that have no seal yet. `stopped`: those
    that the node no longer wants."""

    def __init__(
        self,
        slots: SlotPool,
        volumes: VolumeSet,
        *,
        on_drive: OnDrive,
        feed: Callable[[Event], Any],
        changes: Changes,
    ) -> None:
        self.unsealed: set[Write] = set()
        self.stopped: set[Write] = set()
        self._slots = slots
        self._volumes = volumes
        self._on_drive = on_drive
        self._feed = feed
        self._changes = changes

    async def follow(self) -> None:
        """Tell the node of copies that have begun. Runs until cancelled."""
        told: dict[int, bytes] = {}
        while True:
            filling = {
                rank: slot.file
                for rank, slots in self._slots.ranks.items()
                if (slot := slots.filling()) is not None and _worth_it(slot)
            }
            for rank, file in filling.items():
                copying = file.copying()
                if copying is not None and told.get(rank) != copying.text:
                    told[rank] = copying.text
                    if (control := _control(copying)) is not None:
                        self._feed(Copied(rank, control.id, 0, copying.copied_bytes))
            await asyncio.sleep(_LOOK_S if filling else _IDLE_S)

    @contextlib.asynccontextmanager
    async def begun(self, write: Write) -> AsyncIterator[EarlyWrite | None]:
        """What was written of an image before its seal, once it is known whether it has one. None
        if nothing was. Raises StorageError, UsageError."""
        slots, early = self._slots.rank(write.rank), None
        filling = slots.filling()

        def over() -> bool:
            return slots.filling() != filling or write in self.stopped

        try:
            if filling is not None and _holds(filling.file, write):
                self.unsealed.add(write)
                early = await self._begin(write, filling)
                while not over():
                    await self._changes.until(over, timeout_s=_IDLE_S)
                self.unsealed.discard(write)
                if write not in self.stopped and slots.find(write.id) is None:
                    self._feed(Overwritten(write.rank, write.id))
            yield early
        finally:
            self.unsealed.discard(write)
            self.stopped.discard(write)
            if early is not None:
                await self._on_drive(write.rank, early.drop)

    async def _begin(self, write: Write, filling: Slot) -> EarlyWrite | None:
        """Without room nothing is written early: room is made for sealed images only."""
        file, copying = filling.file, filling.file.copying()
        control = None if copying is None else _control(copying)
        if copying is None or control is None or control.id != write.id or file.cut_off:
            return None
        copied = functools.partial(self._wait, write, file, copying.text)
        view = file.view[:]  # keeps the mapping, whatever becomes of the slot
        begin = functools.partial(self._volumes.begin, view, filling.layout, control, copied)
        with contextlib.suppress(NoSpaceError):
            return await self._on_drive(write.rank, begin)
        return None

    def _wait(self, write: Write, file: SlotFile, text: bytes, size_bytes: int) -> bool:
        """Block until `size_bytes` of this image are in place. False if that is not to be, and once
        it is sealed: what is written from then on is hashed at the same time."""
        until = time.monotonic() + _PATIENCE_S
        while write not in self.stopped and not file.cut_off:
            copying = file.copying()
            if copying is None or copying.text != text:
                return False
            if copying.copied_bytes >= size_bytes:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return False


def _holds(file: SlotFile, write: Write) -> bool:
    """Whether this image is being copied there, or was just sealed there."""
    copying = file.copying()
    control = file.control() if copying is None else _control(copying)
    return control is not None and control.id == write.id


def _control(copying: Copying) -> ControlPage | None:
    try:
        return copying.control()
    except Exception:  # any error of a parser means that nothing useful is said
        return None


def _worth_it(slot: Slot) -> bool:
    return slot.file.huge and slot.layout.size_bytes >= LEAST_ANNOUNCED_BYTES
