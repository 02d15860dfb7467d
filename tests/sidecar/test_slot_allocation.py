"""Every slot that was ordered is made."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from keepstep_sidecar.concurrency import ChangeNotifier, Tasks
from keepstep_sidecar.memory.slot_allocator import SlotAllocator
from keepstep_sidecar.memory.slot_directories import SlotDirectories
from keepstep_sidecar.memory.slot_file import SlotFile
from keepstep_sidecar.memory.slot_pool import SlotPool, SlotSet
from tests.harness import until
from tests.volume.images import RUN, make_layout


async def test_a_slot_is_made_although_an_unexpected_error_ended_its_worker(
    tmp_path: Path, monkeypatch: Any
) -> None:
    pool = SlotPool(SlotDirectories(tmp_path), run=RUN)
    layout = make_layout(world=1)
    slot_set = pool.rank(0).slot_sets[layout.id] = SlotSet(layout)
    slot_set.target = 2
    create = SlotFile.create

    def fails_once(*arguments: Any, **options: Any) -> SlotFile:
        monkeypatch.setattr(SlotFile, "create", create)
        raise RuntimeError("a bug")

    monkeypatch.setattr(SlotFile, "create", fails_once)
    config: Any = None  # how many slots there shall be is given here
    leases: Any = None
    allocator = SlotAllocator(config=config, pool=pool, leases=leases, changes=ChangeNotifier())
    with contextlib.ExitStack() as stack:
        stack.callback(allocator.stop)
        async with Tasks() as tasks:
            allocator.fill(slot_set)
            tasks.spawn_with_retries(allocator.run, "make slots")
            await until(lambda: slot_set.count == 2)
    assert len({file.name for file in slot_set.files}) == 2
