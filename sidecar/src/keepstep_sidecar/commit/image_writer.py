"""Writes images from their slots to the volumes.

A slot is pinned while it is written, so no trainer fills it meanwhile. One exception cannot be
excluded: a new sidecar finds an image while its trainer is about to fill the slot. But a trainer
zeroes the seal before it writes anything else. So a seal that is still there after the write proves
that the bytes were whole. A file without that proof is quarantined.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from keepstep.core.schedule import Write
from keepstep.errors import NoSpaceError, UsageError
from keepstep.image import ControlPage
from keepstep.steps import StepId
from keepstep_sidecar.commit.step_directories import StepDirectories
from keepstep_sidecar.concurrency import OnThread
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.memory.slot_pool import Slot, SlotPool
from keepstep_sidecar.volume.volume import CUT_OFF, Written
from keepstep_sidecar.volume.volume_set import VolumeSet

T = TypeVar("T")


@dataclass
class WriteTotals:
    """Bytes and seconds of all writes since the start, over all ranks."""

    bytes: int = 0
    seconds: float = 0.0


class ImageWriter:
    """`trouble`: why the last write failed, '' after a write that succeeded. `failed`: the step of
    the last failed write. `running`: the writes that have not ended."""

    def __init__(
        self,
        slots: SlotPool,
        volumes: VolumeSet,
        directories: StepDirectories,
        *,
        writers: Sequence[Executor],
        blocking: OnThread,
    ) -> None:
        """`writers`: for each volume an executor of one thread. So a drive writes one image at a
        time, and no drive is idle while another has a queue."""
        self.totals = WriteTotals()
        self.trouble = ""
        self.failed: StepId | None = None
        self.running: set[Write] = set()
        self._slots = slots
        self._volumes = volumes
        self._directories = directories
        self._writers = [OnThread(one) for one in writers]
        self._blocking = blocking

    @property
    def idle(self) -> bool:
        """Whether no sealed image is being written."""
        return not self.running

    async def write(self, write: Write) -> Written | None:
        """Write the shard and return it, durable; None if that failed. Never raises an Exception,
        because the node must hear of the end in any case."""
        try:
            slot = self._slots.rank(write.rank).find(write.id)
            control = None if slot is None else slot.file.control()
            if slot is not None and slot.file.cut_off:
                raise UsageError(CUT_OFF)
            if slot is None or control is None or control.id != write.id:
                return None
            written = await self._write_with_room(slot, control)
            if slot.file.control() == control:
                self._count(written)
                return written
            path = written.shard.path
            warn("overwritten while it was written", path=str(path))
            await self._blocking(lambda: self._volumes.quarantine(path, "overwritten"))
        except Exception as error:
            if str(error) != self.trouble:  # an error that hits every step is logged once
                warn("not persisted", rank=write.rank, step=str(write.id), reason=str(error))
            self.trouble, self.failed = str(error), write.id
        return None

    async def _write_with_room(self, slot: Slot, control: ControlPage) -> Written:
        write = functools.partial(self._volumes.write, slot.file.view, slot.layout, control)
        size_bytes = slot.layout.size_bytes
        while True:
            retired = self._directories.retired
            try:
                return await self._writers[self._volumes.lane(control.rank)](write)
            except NoSpaceError:
                if not await self._directories.make_room(size_bytes, retired=retired):
                    raise

    def _count(self, written: Written) -> None:
        self.trouble = ""
        self.totals.bytes += written.shard.size_bytes
        self.totals.seconds += written.seconds
        say(
            "durable",
            rank=written.shard.rank,
            step=str(written.shard.step_id),
            bytes=written.shard.size_bytes,
            seconds=round(written.seconds, 4),
            level=logging.DEBUG,
        )
