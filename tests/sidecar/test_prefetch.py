"""Whose image a slot may be taken from while another one is loaded."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer import make_layout

from keepstep.errors import NoMemoryError
from keepstep.image import ControlPage, Layout
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.memory.slot_file import SlotFile, rank_directory, slot_name
from keepstep_sidecar.memory.slot_pool import SlotPool, SlotSet
from keepstep_sidecar.restore.fetch import Fetcher
from keepstep_sidecar.restore.prefetch import Loader

EPOCH = Epoch(EpochId(1, "00000001"), None)
AGREED, PLANNED = StepId(EPOCH.id, 4), StepId(EPOCH.id, 5)


class Copy:
    """Of rank 0's image of one step; read once it is let."""

    rank, world, twins, tier, where = 0, 1, (), Tier.ARCHIVE, "archive"

    def __init__(self, id: StepId, layout: Layout) -> None:
        self.id = id
        self.bytes = layout.size_bytes
        self.reading, self.let = asyncio.Event(), asyncio.Event()
        self._layout = layout

    async def layout(self) -> Layout:
        return self._layout

    async def load(self, view: memoryview) -> ControlPage:
        self.reading.set()
        await self.let.wait()
        return ControlPage(
            run="run",
            layout=self._layout.id,
            epoch=EPOCH,
            rank=0,
            world=1,
            step=self.id.step,
            extras_bytes=0,
            staged_at=0.0,
        )


async def test_a_prefetch_of_another_step_leaves_the_slot_of_the_agreed_image_alone(
    tmp_path: Path,
) -> None:
    """There is one slot. The vote chose an older step than this sidecar had planned: what waits
    to fetch that one gives up, whether it asked before the agreed image was there or after."""
    layout = make_layout()
    keeper = SlotPool(tmp_path, run="run")
    slot_set = keeper.rank(0).slot_sets[layout.id] = SlotSet(layout)
    path = rank_directory(tmp_path, 0) / slot_name(layout, 0)
    slot_set.add(SlotFile.create(path, layout, stop=threading.Event()))
    copies = {id: Copy(id, layout) for id in (AGREED, PLANNED)}
    committer: Any = SimpleNamespace(
        look=lambda: SimpleNamespace(watermark=lambda tier: None),
        wanted=lambda: PLANNED,
        ranks=lambda: [0],
        reach=SimpleNamespace(
            nearest=lambda id, rank: Tier.ARCHIVE, origins=lambda id, rank: [copies[id]]
        ),
        ledger=SimpleNamespace(whole=lambda: [AGREED, PLANNED]),
        opening=lambda id, *, on: None,
    )
    waits = asyncio.Event()
    loader = Loader(
        keeper,
        committer,
        Fetcher(keeper, committer),
        changes=Changes(),
        grow=lambda slots, slot_set: waits.set(),
        leased=lambda rank: True,
    )
    opened = asyncio.create_task(loader.bring(AGREED, 0))
    await copies[AGREED].reading.wait()
    before = asyncio.create_task(loader.bring(PLANNED, 0))
    await waits.wait()
    loader.agreed[0] = AGREED
    for copy in copies.values():
        copy.let.set()
    await opened
    for prefetch in (before, loader.bring(PLANNED, 0)):
        with pytest.raises(NoMemoryError, match=f"rank 0 restores step {AGREED}, not {PLANNED}"):
            await prefetch
    assert keeper.rank(0).find(AGREED) is not None
