"""Whose image a slot may be taken from while another one is loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.errors import NoMemoryError
from keepstep.steps import Tier
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.memory.slot_directories import SlotDirectories, rank_directory
from keepstep_sidecar.memory.slot_file import SlotFile, slot_name
from keepstep_sidecar.memory.slot_pool import SlotPool, SlotSet
from keepstep_sidecar.restore.fetcher import Fetcher, MemoryImageLoader
from keepstep_sidecar.tiers.source import FileSource, local_source
from keepstep_sidecar.volume.files import ShardFile
from keepstep_sidecar.volume.run_tree import LocalShard
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import until
from tests.volume.images import RUN, make_layout, staged, step_id

AGREED, PLANNED = step_id(4), step_id(5)


class Copy:
    """Rank 0's image of one step, on a volume; `reading` once its header is known, read as a whole
    once it is `let`."""

    def __init__(self, volumes: VolumeSet, shard: LocalShard) -> None:
        self.reading, self.let = threading.Event(), threading.Event()
        self._headers = 0
        found = local_source(volumes, shard)
        self.source = replace(found, open=lambda: self._opened(found), tier=Tier.ARCHIVE)

    @contextmanager
    def _opened(self, found: FileSource) -> Iterator[ShardFile]:
        if self._headers:
            self.reading.set()
            assert self.let.wait(timeout=60)
        self._headers += 1
        with found.open() as file:
            yield file


async def test_a_prefetch_of_another_step_does_not_overwrite_the_slot_of_the_agreed_step(
    tmp_path: Path,
) -> None:
    """There is one slot. The vote chose an older step than this sidecar had planned: what waits
    to fetch that one gives up, whether it asked before the agreed image was there or after."""
    layout = make_layout(world=1)
    volumes = VolumeSet([Volume(tmp_path / "volume" / RUN, run=RUN)])
    for number in (4, 5):
        slot = staged(layout, number)
        volumes.write(slot.view, layout, slot.control)
    pool = SlotPool(SlotDirectories(tmp_path), run=RUN)
    slot_set = pool.rank(0).slot_sets[layout.id] = SlotSet(layout)
    path = rank_directory(tmp_path, 0) / slot_name(layout, 0)
    slot_set.add(SlotFile.create(path, layout, stop=threading.Event()))
    copies = {shard.step_id: Copy(volumes, shard) for shard in volumes.scan().shards}
    node_host: Any = SimpleNamespace(
        get_current_ledger=lambda: SimpleNamespace(list_reachable_steps=lambda: [AGREED, PLANNED]),
        restart=SimpleNamespace(plan=lambda: SimpleNamespace(id=PLANNED)),
        copies=SimpleNamespace(sources_of_shard=lambda image, rank: [copies[image].source]),
        remotes=SimpleNamespace(scanned=True),
        feed=lambda event: None,
    )
    waits = asyncio.Event()
    allocator: Any = SimpleNamespace(order_restore_slot=lambda slots, slot_set: waits.set())
    leases: Any = SimpleNamespace(
        of=lambda rank: "a lease", is_rank_awaiting_restore=lambda rank: True
    )
    threads = ThreadPoolExecutor(4)
    prefetcher = MemoryImageLoader(
        pool,
        node_host,
        Fetcher(pool, node_host, threads),
        changes=ChangeNotifier(),
        allocator=allocator,
        leases=leases,
    )
    opened = asyncio.create_task(prefetcher.bring_image(AGREED, 0))
    await until(copies[AGREED].reading.is_set)
    before = asyncio.create_task(prefetcher.bring_image(PLANNED, 0))
    await waits.wait()
    prefetcher.agreed[0] = AGREED
    for copy in copies.values():
        copy.let.set()
    await opened
    for prefetch in (before, prefetcher.bring_image(PLANNED, 0)):
        with pytest.raises(NoMemoryError, match=f"rank 0 restores step {AGREED}, not {PLANNED}"):
            await prefetch
    assert pool.rank(0).find(AGREED) is not None
    threads.shutdown()
    volumes.close()
