"""A `NodeHost` on real volumes and slots, without the process around it."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keepstep.core.retention import Retention
from keepstep.core.schedule import StepGrid
from keepstep_sidecar.commit.node_host import NodeHost, Spawn
from keepstep_sidecar.commit.reachable_copies import RemoteInventory
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.volume.volume import VolumeSet
from tests.volume.images import make_layout, staged


def refuse(work: Coroutine[Any, Any, None], name: str) -> None:
    """Nothing is to be written where nothing was sealed."""
    work.close()
    raise AssertionError(name)


def make_node_host(
    volumes: VolumeSet,
    slots: SlotPool,
    threads: ThreadPoolExecutor,
    *,
    remotes: RemoteInventory | None = None,
    spawn: Spawn = refuse,
    keep: int = 9,
    alone: bool = False,
) -> NodeHost:
    """`threads`: for everything that blocks."""
    return NodeHost(
        volumes,
        slots,
        remotes=remotes or RemoteInventory(),
        names=threads,
        writers=[threads],
        changes=ChangeNotifier(),
        spawn=spawn,
        keep=Retention(last=keep),
        grid=StepGrid(1),
        alone=alone,
    )


def write(node_host: NodeHost, number: int, *, rank: int = 0, world: int = 1) -> None:
    """A rank makes a step durable."""
    slot = staged(make_layout(rank=rank, world=world), number)
    node_host.wrote(
        node_host.local_shards.volumes.write(slot.view, slot.layout, slot.control).shard
    )
