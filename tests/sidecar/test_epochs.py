"""An epoch is durable on this pod's own volumes before its trainer hears so."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from node_hosts import make_node_host

from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep_sidecar.commit.reachable_copies import RemoteInventory
from keepstep_sidecar.memory.slot_directories import SlotDirectories
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.tiers.remote_tier import Inventory, RemoteTier
from keepstep_sidecar.volume.volume import Volume, VolumeSet

ONE = EpochId(1, "0000000a")
NEXT = Epoch(EpochId(2, "0000000b"), StepId(ONE, 100))


class Quicker(RemoteTier):
    """Another pod, whose trainer began the epoch before ours."""

    tier, where = Tier.PEER, "there"

    async def scan(self) -> Inventory:
        return Inventory(answer=TierAnswer.NONE, epochs=(NEXT,))


def test_an_epoch_that_was_first_learned_from_another_pod_is_still_recorded_locally(
    tmp_path: Path,
) -> None:
    volumes = VolumeSet([Volume(tmp_path / "volume" / "run", run="run")])
    (tmp_path / "memory").mkdir()
    with ThreadPoolExecutor(1) as threads:
        remotes = RemoteInventory(Quicker())
        slots = SlotPool(SlotDirectories(tmp_path / "memory"), run="run")
        node_host = make_node_host(volumes, slots, threads, remotes=remotes)

        async def story() -> None:
            await node_host.scan_volumes()
            await node_host.refresh_remotes()
            assert NEXT in node_host.node.ledger.epochs
            await node_host.start_epoch(NEXT)

        asyncio.run(story())
    assert volumes.record.epochs == (NEXT,)
    volumes.close()
