"""Pods of a run on loopback: each with a real volume, a real certificate, a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from keepstep.steps import StepId
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.config.sidecar import PeerSettings
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.volume.run_tree import LocalShard
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.peer.authority import FileCredentials, Files
from tests.volume.images import RUN, Slot, make_layout, staged

BIG = 5_000_000
"""Parameters of an image of six chunks."""


class Node:
    """One pod: `<directory>/<node rank>` is its drive."""

    def __init__(
        self,
        directory: Path,
        node_rank: int,
        files: Files,
        **options: Any,
    ) -> None:
        self.node_rank = node_rank
        self.root = directory / str(node_rank) / RUN
        self.volume = Volume(self.root, run=RUN, **options)
        self.volumes = VolumeSet([self.volume])
        self.files = files
        self.remote_tier = self.make()

    def make(self, **settings: Any) -> PeerTier:
        return PeerTier(
            PeerSettings(listen="127.0.0.1:0", **settings),
            self.volumes,
            run=RUN,
            credentials=FileCredentials(self.files, check_every_s=0.0),
        )

    @property
    def address(self) -> str:
        return self.remote_tier.address

    def knows(self, *others: Node, buddies: tuple[Node, ...] = ()) -> None:
        """As an operator tells it."""
        self.remote_tier.peers_are(
            tuple(
                Peer(node_rank=node.node_rank, address=node.address, buddy=node in buddies)
                for node in others
            )
        )

    def write(self, step: int, *, rank: int, parameters: int = 6000) -> tuple[Slot, LocalShard]:
        """Make an image durable here; as a scan finds it."""
        slot = staged(make_layout(rank=rank, world=2, parameters=parameters), step)
        self.volume.write(slot.view, slot.layout, slot.control)
        found = [shard for shard in self.volume.scan().shards if shard.step_id == slot.id]
        return slot, next(shard for shard in found if shard.rank == rank)

    def copies(self) -> list[tuple[int, int]]:
        """(step, rank) of the copies here."""
        return [
            (shard.step_id.step, shard.rank) for shard in self.remote_tier.list_copies_for_peers()
        ]

    def copy_path(self, step_id: StepId) -> Path:
        (path,) = (self.root / "peers" / str(step_id)).glob("rank-*")
        return path


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    """All of them at work; stopped in order afterwards."""
    tasks = [asyncio.create_task(node.remote_tier.run()) for node in nodes]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in nodes:
            await node.remote_tier.close()
            node.volume.close()


def same(view: memoryview, slot: Slot) -> bool:
    """All that a digest covers; table and control page differ from the staged ones."""
    end = slot.layout.digests_begin
    return bytes(view[:end]) == bytes(slot.view[:end])
