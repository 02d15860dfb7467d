"""A step that nobody needs goes; one that somebody reads goes when nobody does any more."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from node_hosts import make_node_host, write

from keepstep.core.node import LastReply, StepReadEvent
from keepstep_sidecar.memory.slot_directories import SlotDirectories
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import eventually
from tests.volume.images import RUN, step_id


def test_a_step_kept_for_a_reader_is_retired_afterwards_without_another_write(
    tmp_path: Path, memory_dir: Path
) -> None:
    volumes = VolumeSet([Volume(tmp_path / RUN, run=RUN)])

    async def story(threads: ThreadPoolExecutor) -> None:
        node_host = make_node_host(
            volumes, SlotPool(SlotDirectories(memory_dir), run=RUN), threads, keep=1
        )
        sweeping = asyncio.create_task(node_host.delete_deferred_steps())
        await node_host.scan_volumes()
        write(node_host, 1)
        await node_host.report_holdings_to_node()
        node_host.feed(StepReadEvent(step_id(1), begins=True))
        write(node_host, 2)
        await node_host.report_holdings_to_node()
        node_host.feed(LastReply(commit=step_id(2), retire=frozenset({step_id(1)})))
        await node_host.report_holdings_to_node()
        assert sorted(node_host.local_shards.published) == [step_id(1), step_id(2)], (
            "somebody reads the first"
        )
        node_host.feed(StepReadEvent(step_id(1), begins=False))
        await asyncio.to_thread(eventually, lambda: len(list((tmp_path / RUN).glob("0*"))) == 1)
        sweeping.cancel()
        await asyncio.wait([sweeping])
        assert list(node_host.local_shards.published) == [step_id(2)]

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(story(threads))
    volumes.close()
