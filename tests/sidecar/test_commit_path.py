"""From *sealed* to *committed*: which files a step passes, seen by following one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from committers import make_committer

from keepstep.core.node import Sealed, Serves
from keepstep_sidecar.memory.slot_directories import SlotDirectories, rank_directory
from keepstep_sidecar.memory.slot_file import SlotFile, slot_name
from keepstep_sidecar.memory.slot_pool import SlotPool, SlotSet
from keepstep_sidecar.volume.volume import Volume
from keepstep_sidecar.volume.volume_set import VolumeSet
from scripts.house import SEALED_TO_COMMITTED
from tests.volume.images import RUN, make_layout, staged

SHARED = (
    "keepstep/image/",  # the format
    "keepstep/core/ledger/",  # what machine and copies are made of
    "keepstep/core/holding.py",
    "keepstep/core/lineage.py",
    "keepstep/core/schedule.py",
    "keepstep/core/ranks.py",  # whose images are alike
    "keepstep/core/retention.py",
    "keepstep/core/shard.py",
    "keepstep/core/slot_table.py",  # where the image lies
    "keepstep_sidecar/memory/",
    "keepstep_sidecar/volume/paths.py",
    "keepstep_sidecar/volume/filesystem.py",
    "keepstep_sidecar/volume/faults.py",
    "keepstep_sidecar/volume/scan.py",
    "keepstep_sidecar/volume/spare_files.py",  # over which older file it may be written
    "keepstep_sidecar/commit/epochs.py",  # whose step it is
    "keepstep_sidecar/commit/eviction_status.py",  # whether there is room again
    "keepstep_sidecar/concurrency.py",
    "keepstep_sidecar/history.py",  # what people are told
    "keepstep_sidecar/log.py",
    "keepstep/log.py",
    "keepstep/steps.py",
    "keepstep/directory.py",  # that no link is followed
)
"""What a step is made of, and helpers that decide and move nothing of it."""


class Followed:
    """The source files of ours that run while this is on, in all threads."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and "/src/keepstep" in frame.f_code.co_filename:
            self.files.add(frame.f_code.co_filename.split("/src/")[1])


def slot_of(slots: SlotPool) -> SlotSet:
    """One slot of rank 0, that its trainer fills."""
    layout = make_layout(world=1)
    rank, directory = slots.rank(0), rank_directory(slots.directories.small, 0)
    file = SlotFile.create(directory / slot_name(layout, 0), layout, stop=threading.Event())
    slot_set = SlotSet(layout, wanted=1)
    slot_set.add(file)
    slot_set.assign()
    rank.slot_sets[layout.id] = slot_set
    rank.settled = True
    return slot_set


def test_a_step_passes_a_dozen_files_from_sealed_to_committed(
    tmp_path: Path, memory_dir: Path
) -> None:
    image, followed = staged(make_layout(world=1), 1), Followed()
    slots, volumes = (
        SlotPool(SlotDirectories(memory_dir), run=RUN),
        VolumeSet([Volume(tmp_path / RUN, run=RUN)]),
    )
    writes: list[Coroutine[Any, Any, None]] = []

    async def commit(threads: ThreadPoolExecutor) -> None:
        committer = make_committer(
            volumes, slots, threads, spawn=lambda work, name: writes.append(work)
        )
        slot_set = slot_of(slots)
        await committer.scan()
        committer.feed(Serves(frozenset({0}), 4))
        slot_set.files[0].view[:] = image.view
        slot_set.seal(0, image.id)
        followed.on = True
        sys.setprofile(followed)
        committer.feed(Sealed(0, image.id))
        for write in writes:
            await write
        sys.setprofile(None)
        followed.on = False
        assert list(committer.published) == [image.id]

    threading.setprofile(followed)
    try:
        with ThreadPoolExecutor(1) as threads:
            asyncio.run(commit(threads))
    finally:
        threading.setprofile(None)
        volumes.close()
        slots.forget_all()
    passed = {path for path in followed.files if not path.startswith(SHARED)}
    passed |= {path for path in SEALED_TO_COMMITTED if path in followed.files}
    assert passed == set(SEALED_TO_COMMITTED)
