"""The sidecar as a server: it claims its directories, listens, and shuts down cleanly."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keepstep.core.schedule import PersistCostMeasurements, StepGrid
from keepstep.errors import ImageError, StorageError
from keepstep.steps import Epoch
from keepstep.wire.member_reports import ReportReply
from keepstep_sidecar import log, unauthenticated_connections
from keepstep_sidecar.api.pinning import PinHandlers
from keepstep_sidecar.api.restoring import RestoreHandlers
from keepstep_sidecar.api.saving import SaveHandlers, StepLongPoll
from keepstep_sidecar.api.server import serve_until_stopped
from keepstep_sidecar.api.sidecar_service import SidecarService
from keepstep_sidecar.api.status import persist_history, record_warnings_in_history, volume_status
from keepstep_sidecar.commit.leader_state_record import ReportingState
from keepstep_sidecar.commit.node_host import NodeHost
from keepstep_sidecar.commit.reachable_copies import RemoteInventory
from keepstep_sidecar.commit.remote_tiers import RemoteTiers
from keepstep_sidecar.concurrency import ChangeNotifier, Tasks
from keepstep_sidecar.config.sidecar import Config, OnLoss
from keepstep_sidecar.history import MachineHistory
from keepstep_sidecar.leader.host import OWN
from keepstep_sidecar.leases import Leases, OwnerProcessWatcher
from keepstep_sidecar.log import warn
from keepstep_sidecar.memory.slot_allocator import SlotAllocator
from keepstep_sidecar.memory.slot_directories import DirectoryLock, SlotDirectories
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.report import report
from keepstep_sidecar.report.leader_access import LeaderAccess
from keepstep_sidecar.report.reporter import LeaderReporter, ReportSource
from keepstep_sidecar.restore.chunk_buffers import ChunkBuffers
from keepstep_sidecar.restore.fetcher import Fetcher, MemoryImageLoader
from keepstep_sidecar.restore.restorer import Restorer
from keepstep_sidecar.restore.sources import ImageSourceHandlers
from keepstep_sidecar.volume.history_file import HistoryFile
from keepstep_sidecar.volume.volume import Volume, VolumeSet

_MOST_READS = 32
"""How many images and groups of chunks are read at the same time, from all sources together."""

_UMASK = 0o007
"""Trainers of the same group may connect and fill slots; other users have no access."""


def serve(config: Config) -> None:
    """Serve until the sidecar ends. Raises KeepstepError when it cannot start."""
    log.configure(config.run)
    os.umask(_UMASK)
    unauthenticated_connections.raise_descriptor_limit()
    lock = DirectoryLock(config)
    lock.take()
    try:
        asyncio.run(_serve(config, lock))
    finally:
        lock.release_and_clean_up()


def _open_volume(directory: Path, config: Config) -> Volume:
    """Open a volume. Raises StorageError if that fails and there is no operator.

    A run that silently lacks a volume may also lack the steps on it. With an operator the missing
    volume is reported, and training does not wait until the volume works.
    """
    root = directory / config.run
    try:
        return Volume(
            root,
            run=config.run,
            io_threads=config.io_threads,
            capacity_bytes=config.capacity_bytes,
        )
    except (StorageError, ImageError) as error:  # also a damaged record, or another run's
        if config.reporting is None:
            raise
        warn("volume.open_failed", path=str(root), error=str(error))
        return Volume(root, run=config.run, read_only=str(error))


async def _serve(config: Config, lock: DirectoryLock) -> None:
    opened = [_open_volume(directory, config) for directory in config.volumes]
    volumes = VolumeSet(opened, bytes_per_second=config.bytes_per_second)
    async with Tasks() as tasks:
        service, reports = build(config, volumes, tasks)
        try:
            service.start()
            tasks.spawn_with_retries(
                functools.partial(record_warnings_in_history, service), "note warnings"
            )
            tasks.spawn_with_retries(functools.partial(persist_history, service), "keep history")
            tasks.spawn_with_retries(reports.run, "report")
            await serve_until_stopped(service, tasks, lock)
        finally:
            await service.remote_tiers.close()
            await service.close()


def _history(file: HistoryFile) -> MachineHistory:
    """The history of earlier sidecars; a new one if that is unusable. Nothing depends on it."""
    try:
        return MachineHistory(*file.read(now=time.time()), history_id=file.id)
    except (ArithmeticError, ValueError, TypeError) as error:
        warn("history.reset", error=repr(error))
        return MachineHistory()


def build(
    config: Config, volumes: VolumeSet, tasks: Tasks
) -> tuple[SidecarService, LeaderReporter]:
    """Build all parts, in the order in which an image passes them. No part is replaced later."""
    drives = len(volumes.volumes)
    names, readers = _threads("names", 1), _threads("read", _MOST_READS)
    writers = [_threads(f"write-{number}", 1) for number in range(drives)]
    changes = ChangeNotifier()
    led = LeaderAccess(config, changes)
    leader = ReportingState(changes)
    leases = Leases(changes)
    history_file = HistoryFile(volumes.history_path, run=config.run)
    history = _history(history_file)
    slot_directories = SlotDirectories(
        config.memory_dir, huge=config.huge_pages_dir, only_small=config.small_pages
    )
    slots = SlotPool(slot_directories, run=config.run)
    allocator = SlotAllocator(config=config, pool=slots, leases=leases, changes=changes)
    node_host = NodeHost(
        volumes,
        slots,
        remotes=_remote_tiers(
            config, volumes, led, epochs=lambda: node_host.epochs.collect_own_epochs()
        ),
        names=names,
        writers=writers,
        changes=changes,
        spawn=tasks.spawn,
        keep=config.retention,
        grid=StepGrid(config.persist_grid_interval, milestones=config.milestones),
        pacing=_pacing(config),
        alone=config.alone,
        rollback_request=config.rollback_request,
        history=history,
    )
    node_host.epochs.training = lambda: leases.training_ranks
    operated = config.reporting is not None
    remote_tiers = RemoteTiers(node_host, changes, operated=operated, leads=config.node_rank == OWN)
    fetcher = Fetcher(slots, node_host, readers)
    image_sources = ImageSourceHandlers(slots, node_host, leases, fetcher)
    chunk_buffers = ChunkBuffers(
        fetcher, leases, memory_dir=config.memory_dir, limit_bytes=config.memory_limit_bytes
    )
    prefetcher = MemoryImageLoader(
        slots,
        node_host,
        fetcher,
        changes=changes,
        allocator=allocator,
        leases=leases,
    )
    restorer = Restorer(
        prefetcher,
        image_sources,
        chunk_buffers,
        fleeting=config.on_loss is OnLoss.RESTART,
        way_out=config.fresh_start_command,
    )
    saving = SaveHandlers(
        config,
        slots=slots,
        node_host=node_host,
        allocator=allocator,
        leases=leases,
        restorer=restorer,
        changes=changes,
        history=history,
    )
    service = SidecarService(
        tasks=tasks,
        leader=leader,
        volumes=volumes,
        executors=(readers, *writers, names),
        owner=OwnerProcessWatcher(changes),
        remote_tiers=remote_tiers,
        image_sources=image_sources,
        chunk_buffers=chunk_buffers,
        saving=saving,
        restoring=RestoreHandlers(saving, remote_tiers, leader),
        step_waits=StepLongPoll(saving, remote_tiers),
        pinning=PinHandlers(
            node_host,
            changes,
            share=led.set_pins,
            operator=operated,
        ),
        history_file=history_file,
        run_warnings=led.warnings,
    )
    channel = led.channel(
        volumes.record.pinned,
        lambda: node_host.node.ledger.lineage.current_epoch,
        lambda: service.leaves,
    )
    led.start(tasks, node_host.record_leader_alarm)

    async def apply(reply: ReportReply) -> None:
        await service.apply_reply(reply)
        await led.trust_authorities(reply.authorities)

    observed = ReportSource(
        measure=lambda: volume_status(service),
        report=lambda volumes, sequence: report.build_member_report(
            service, volumes, sequence=sequence
        ),
        urgent=lambda: report.is_urgent(service),
    )
    return service, LeaderReporter(channel, observed, leader=leader, apply=apply, changes=changes)


def _pacing(config: Config) -> PersistCostMeasurements | None:
    """How often a step is persisted; None where a person set a fixed interval."""
    if config.persist_every is not None:
        return None
    return PersistCostMeasurements(
        config.persist_grid_interval,
        drive_writes_per_day=config.drive_writes_per_day,
        copies=config.peer_settings.replicas if config.peer_settings else 0,
    )


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=name)


def _remote_tiers(
    config: Config,
    volumes: VolumeSet,
    led: LeaderAccess,
    *,
    epochs: Callable[[], tuple[Epoch, ...]],
) -> RemoteInventory:
    """The configured remote tiers. Their modules are imported only when they are configured."""
    archive = ancestor = None
    if config.archive_config is not None:
        from keepstep_sidecar.tiers.archive import tier

        archive, ancestor = tier.build_archive_tiers(config, config.archive_config, epochs=epochs)
    peers = None if led.machines is None else led.machines.build_peer_tier(volumes)
    return RemoteInventory(peers=peers, archive=archive, ancestor=ancestor)
