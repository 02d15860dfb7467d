"""`GET /v1/status`: the whole state at one moment, as `wire.status.Status`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
from collections.abc import Mapping

from keepstep.core.slot_table import SlotState
from keepstep.core.suspicion import SuspectSteps
from keepstep.errors import StorageError
from keepstep.image import HUGE_PAGE_BYTES
from keepstep.steps import StepId, Tier
from keepstep.wire.status import RankStatus, SlotStatus, Status, StepStatus, VolumeStatus
from keepstep.wire.trainer import PROTOCOL
from keepstep_sidecar import __version__
from keepstep_sidecar.api.sidecar_service import SidecarService
from keepstep_sidecar.concurrency import run_on_detached_thread
from keepstep_sidecar.config.settings import format_size
from keepstep_sidecar.log import warn
from keepstep_sidecar.memory.slot_directories import huge_pages_advice
from keepstep_sidecar.memory.slot_file import may_swap, pinning_text
from keepstep_sidecar.memory.slot_pool import RankSlots, SlotSet
from keepstep_sidecar.volume.volume import Volume


async def collect_status(service: SidecarService) -> Status:
    """The current state. Asks the volumes for their space, so it may take a few milliseconds."""
    volumes = await volume_status(service)
    node_host = service.node_host
    node, ledger, totals = node_host.node, node_host.get_current_ledger(), node_host.images.totals
    pacing, doubt = node.pacing, node_host.restart.get_suspect_steps()
    marks = {
        Tier.MEMORY: choose_newest_step(ledger.watermark(Tier.MEMORY), node.last_reply.memory),
        Tier.LOCAL: node.last_commit(),
        **{tier: ledger.watermark(tier) for tier in node_host.remotes.tiers},
    }
    newest = max(
        (counter.staged.step for counter in service.saving.counters.values() if counter.staged),
        default=0,
    )
    return Status(
        run=service.config.run,
        sidecar=__version__,
        pid=os.getpid(),
        started_at=service.started_at,
        protocol=PROTOCOL,
        locked=swap_warning(service),
        hints=speed_hints(service),
        epoch=node_host.epochs.current
        or max(ledger.epochs, key=lambda epoch: epoch.id, default=None),
        watermarks={str(tier): step_id for tier, step_id in marks.items() if step_id is not None},
        committed_at=node_host.local_shards.committed_at,
        reported_at=service.leader.replied_at,
        persist_every=node.persist_every(newest),
        persist_interval=pacing.interval if pacing else None,
        persist_measured=pacing.measured if pacing else None,
        stage_every=service.saving.stage_every,
        persisted=node.persist_counts.persisted,
        persist_skipped=node.persist_counts.skipped + node.persist_counts.abandoned,
        persist_seconds=totals.seconds,
        persist_bytes=totals.bytes,
        evicted=node_host.directories.evicted,
        goodput=service.history.goodput(),
        ranks=tuple(
            _rank(service, rank_slots) for _, rank_slots in sorted(service.slots.ranks.items())
        ),
        volumes=volumes,
        tiers=service.remote_tiers.statuses(),
        steps=tuple(
            _step(service, step_id, doubt)
            for step_id in sorted(node_host.copies.ids(), reverse=True)
        ),
        scanned=node_host.local_shards.scanned,
        survives=list_survivable_events(marks),
        warnings=current_warnings(service),
        leased_at=service.saving.leased_at,
        uncaught=service.saving.uncaught,
        window_bytes={str(tier): size for tier, size in service.chunk_buffers.read_bytes.items()},
        window_shared_bytes=service.chunk_buffers.shared_bytes,
    )


_KEEP_S = 2.0
"""Shortest pause between two checks of the warnings, and between two writes of the history."""

_HANGS_S = 30.0


async def record_warnings_in_history(service: SidecarService) -> None:
    """Record in the history when warnings appear and disappear. Runs until cancelled."""
    while True:
        await asyncio.sleep(_KEEP_S)
        service.saving.check_ranks_save_same_steps()
        service.history.record_warning_changes(current_warnings(service))


async def persist_history(service: SidecarService) -> None:
    """Write the history to its file, where there is one, so that it outlives this process. Runs
    until cancelled.

    Only one write runs at a time, on a thread that nothing else needs. While its volume hangs, new
    events stay in the bounded list in memory.
    """
    history, file = service.history, service.history_file
    while file.path is not None:
        if not await history.changes.until(
            lambda: history.has_events_after(file.written), timeout_s=3600.0
        ):
            continue
        await asyncio.sleep(_KEEP_S)
        append = functools.partial(file.append, history.list_events_after(0), history.before)
        writing = run_on_detached_thread(append, "history")
        if not (await asyncio.wait({writing}, timeout=_HANGS_S))[0]:
            warn("history.write_stalled", path=str(file.path), reason="its volume does not answer")
        await writing


def list_survivable_events(marks: Mapping[Tier, StepId | None]) -> tuple[str, ...]:
    """What the run would survive now, apart from losing steps. `marks`: watermarks. Pure.

    One machine without another tier never survives its own loss.
    """
    beyond = choose_newest_step(*(step_id for tier, step_id in marks.items() if not tier.in_pod))
    local = marks.get(Tier.LOCAL) or beyond
    outlived = {
        "ContainerRestart": marks.get(Tier.MEMORY) or local,
        "PodRestart": local,
        "NodeLoss": beyond,
    }
    return tuple(name for name, step_id in outlived.items() if step_id is not None)


def choose_newest_step(*ids: StepId | None) -> StepId | None:
    """The newest of the steps that are not None; None if there is none."""
    return max((step_id for step_id in ids if step_id is not None), default=None)


async def volume_status(service: SidecarService) -> tuple[VolumeStatus, ...]:
    """The status of every volume, with its space measured anew. May wait for a slow drive."""
    volumes = service.volumes.volumes
    return await service.local_shards.blocking(
        lambda: tuple(_volume(volume, service) for volume in volumes)
    )


def _volume(volume: Volume, service: SidecarService) -> VolumeStatus:
    """A failed volume reports only why it failed (`failed`), and does not hide the others."""
    reason = f" ({volume.engine_reason})" if volume.engine_reason else ""
    used, free, quarantined = 0, 0, 0
    with contextlib.suppress(StorageError):
        used, free = volume.used_bytes(), volume.free_bytes()
        quarantined = volume.count_quarantined_files()
    return VolumeStatus(
        path=str(volume.root),
        engine=f"{volume.engine}{reason}",
        used_bytes=used,
        free_bytes=free,
        capacity_bytes=service.config.capacity_bytes,
        failed=volume.failed,
        quarantined=quarantined,
    )


def _rank(service: SidecarService, slots: RankSlots) -> RankStatus:
    lease = service.leases.of(slots.rank)
    counters = service.saving.get_rank_counters(slots.rank)
    return RankStatus(
        rank=slots.rank,
        world=slots.world,
        alive=lease is not None,
        pid=lease.request.pid if lease else 0,
        staged=counters.staged or max(slots.list_sealed_steps(), default=None),
        durable=max(
            (
                step_id
                for step_id, held in service.local_shards.shards.items()
                if slots.rank in held
            ),
            default=None,
        ),
        slot_bytes=slots.current.layout.size_bytes if slots.current else 0,
        slots=tuple(slot for slot_set in slots.slot_sets.values() for slot in _slots(slot_set)),
        saves=counters.saves,
        skipped=sum(counters.skipped.values()),
        discarded=counters.discarded,
        blocked_s=counters.blocked_s,
        copy_s=counters.copy_s,
        warning=slots.warning,
        waits=service.restoring.votes.waits.get(slots.rank, ""),
        restart=service.saving.restarts.last.get(slots.rank),
    )


def _slots(slot_set: SlotSet) -> list[SlotStatus]:
    orphans = [SlotStatus(slot=name, state="orphan") for name in slot_set.orphans]
    table = slot_set.table.slots
    return orphans + [
        SlotStatus(
            slot=file.name,
            state=str(table[index].state),
            id=table[index].id if table[index].state is SlotState.SEALED else None,
            pinned=table[index].pinned,
        )
        for index, file in slot_set.iterate_files_without_orphans()
    ]


def _step(service: SidecarService, step_id: StepId, doubt: SuspectSteps) -> StepStatus:
    node_host, published = service.node_host, service.local_shards.published
    memory, remotes = service.slots.find_slots_by_rank(step_id), node_host.remotes
    shards = [*(slot.shard for slot in memory.values())]
    shards += [shard for _, shard in node_host.copies.copies_at_rest(step_id)]
    held: dict[Tier, set[int]] = {tier: set() for tier in (Tier.MEMORY, Tier.LOCAL, *remotes.tiers)}
    held[Tier.MEMORY].update(memory)
    held[Tier.LOCAL].update(service.local_shards.get_durable_shards(step_id))
    for rank, places in remotes.find_copies_by_rank(step_id).items():
        for place in places:
            held[place.tier].add(rank)
    return StepStatus(
        id=step_id,
        world=max(shard.world for shard in shards),
        ranks={tier: tuple(sorted(ranks)) for tier, ranks in held.items() if ranks},
        bytes=sum({shard.rank: shard.size_bytes for shard in reversed(shards)}.values()),
        committed=step_id in published,
        path=published.get(step_id, ""),
        dead=(dead := node_host.node.is_dead(step_id)),
        suspect=not dead and doubt.is_suspect(step_id),
        proven=not dead and doubt.is_proven(step_id),
    )


def swap_warning(service: SidecarService) -> str:
    """Whether slots can be swapped out, and what to do about it."""
    slots = {(file.huge, file.locked) for file in service.slots.files()}
    if not slots:
        return "no slots yet"
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return pinning_text(slots, swap=may_swap(), limit_bytes=limit_bytes)


def speed_hints(service: SidecarService) -> tuple[str, ...]:
    """What a person can do to make this run faster."""
    if service.config.small_pages or service.config.reporting is not None:
        return ()  # by request, or a matter of the policy
    current = [rank.current for rank in service.slots.ranks.values() if rank.current]
    lacking = sum(
        slot_set.layout.size_bytes
        * (slot_set.target - sum(file.huge for _, file in slot_set.iterate_files_without_orphans()))
        for slot_set in current
        if slot_set.layout.size_bytes % HUGE_PAGE_BYTES == 0
    )
    if lacking <= 0 or not (commands := huge_pages_advice(lacking)):
        return ()
    size = format_size(lacking)
    return (f"slots of {size} are on small pages; before the next start: {commands}",)


def troubles(service: SidecarService) -> tuple[str, ...]:
    """What keeps this sidecar from its work, each once: a scan or a volume that fails."""
    volumes = service.volumes.volumes
    found = [service.local_shards.scan_failed]
    found += [f"{volume.root}: {volume.failed}" for volume in volumes if volume.failed]
    return tuple(dict.fromkeys(text for text in found if text))


def current_warnings(service: SidecarService) -> tuple[str, ...]:
    """What people should look at, each text once."""
    found = [slots.warning for slots in service.slots.ranks.values() if slots.warning]
    node_host, node = service.node_host, service.node
    found += [node_host.images.trouble, node.shortage_text, service.local_shards.unreadable]
    found += [node_host.restart.suspicion_text(), *node.alarms, service.saving.unequal]
    found += [volume.failed for volume in service.volumes.volumes]
    found += service.saving.refused.values()
    found += service.saving.list_unstaged_warnings()
    found += service.leases.trainer_warnings
    found += [
        f"{status.where}: {status.trouble}"
        for status in service.remote_tiers.statuses().values()
        if status.trouble
    ]
    found += [tier.warning for tier in service.remote_tiers.remote_tiers]
    found += [service.no_metrics, *service.run_warnings()]
    # Pods come and go, so an unknown peer is no warning. An archive that does not answer is one.
    found.append(node_host.remotes.why_unknown(Tier.ARCHIVE))
    found += [
        slot_set.failure
        for slots in service.slots.ranks.values()
        for slot_set in slots.slot_sets.values()
    ]
    return tuple(dict.fromkeys(text for text in found if text))
