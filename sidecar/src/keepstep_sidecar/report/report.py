"""The content of a report: everything that this sidecar knows at one moment. Sends nothing.

Separate from `reporter`, which decides when to look and knows how to send.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from keepstep.core.commit_rule import RankReport, ReportedTier, merge_equal_reports
from keepstep.core.shard import Ranks, Shard, ShardsOfStep
from keepstep.steps import IN_POD, Epoch, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import (
    Report,
    ReportedGoodput,
    ReportedRanks,
    ReportedVolume,
)
from keepstep.wire.run_reports import SaveOverhead
from keepstep.wire.status import RemoteTierProgress, VolumeStatus, VolumeUsage
from keepstep_sidecar import __version__
from keepstep_sidecar.api import status as shown_status
from keepstep_sidecar.api.sidecar_service import SidecarService
from keepstep_sidecar.history import MachineHistory
from keepstep_sidecar.volume.volume import Volume

_NOTHING = dict.fromkeys(IN_POD, ReportedTier.from_shards(()))
_RESTART_S = 120.0
"""A trainer that takes longer to come back will find the leader's plan anyway."""
_WARNINGS = 10
_WARNING_CHARACTERS = 500
_REFUSED_CHARACTERS = 1000


def is_urgent(service: SidecarService) -> bool:
    """Whether the leader's answer is needed soon. This is so if a trainer waits for a commit or
    to vote, or if a rank that holds something has just lost its trainer and will restore what all
    ranks have."""
    recent = time.monotonic() - service.saving.changed_at < _RESTART_S
    restoring = any(
        service.leases.is_rank_awaiting_restore(rank)
        for rank in service.node_host.copies.list_ranks_ever_held()
    )
    awaited = service.step_waits.awaited > 0 or bool(service.restoring.votes.waits)
    return awaited or bool(service.remote_tiers.awaits) or (recent and restoring)


def build_member_report(
    service: SidecarService, volumes: tuple[VolumeStatus, ...], *, sequence: int
) -> Report:
    """The whole report, with an entry for each rank. `volumes`: measured just before, because that
    may block."""
    node_host = service.node_host
    return Report(
        sidecar=__version__,
        started_at=service.started_at,
        sequence=sequence,
        ready=node_host.local_shards.scanned,
        library=service.saving.library,
        pinned=_pinned(service),
        epochs=_epochs(service),
        ranks=_ranks(service),
        stall=_stall(service),
        restores=tuple(service.restoring.restores),
        volumes=tuple(map(_volume, service.volumes.volumes, volumes)),
        warnings=tuple(
            text[:_WARNING_CHARACTERS]
            for text in shown_status.current_warnings(service)[:_WARNINGS]
        ),
        peer_address=service.remote_tiers.address,
        tiers={
            tier: RemoteTierProgress(**_part_of(status, RemoteTierProgress))
            for tier, status in service.remote_tiers.statuses().items()
        },
        failures=node_host.restart.list_all_known_failures(),
        goodput=_goodput(service.history),
        refusals=max(service.restoring.refusals.values(), default=0),
        refused=service.restoring.refused[:_REFUSED_CHARACTERS],
    )


def _goodput(history: MachineHistory) -> ReportedGoodput | None:
    goodput = history.goodput()
    return None if goodput is None else ReportedGoodput.from_goodput(goodput, history.id)


def _stall(service: SidecarService) -> SaveOverhead:
    counted = [
        service.saving.get_rank_counters(rank)
        for rank in service.node_host.copies.list_ranks_ever_held()
    ]
    return SaveOverhead(
        skipped=sum(sum(counts.skipped.values()) for counts in counted),
        discarded=sum(counts.discarded for counts in counted),
        blocked_seconds=sum(counts.blocked_s for counts in counted),
    )


def _pinned(service: SidecarService) -> str:
    return shown_status.swap_warning(service) if any(service.slots.files()) else ""


def _epochs(service: SidecarService) -> tuple[Epoch, ...]:
    """The recorded epochs, and the one in which a live trainer says it works."""
    recorded = service.node_host.node.ledger.epochs
    current = service.node_host.epochs.current
    unrecorded = current is not None and current.id not in {epoch.id for epoch in recorded}
    return (*recorded, current) if current is not None and unrecorded else recorded


def _ranks(service: SidecarService) -> tuple[ReportedRanks, ...]:
    """The ranks of this pod, and those of other pods of which it knows something. A rank that moved
    to another pod is the latter as soon as nothing of it is left here."""
    kept: dict[int, list[Shard]] = {}
    for shard in service.remote_tiers.list_copies_for_others():
        kept.setdefault(shard.rank, []).append(shard)
    here = [
        rank for rank in service.node_host.copies.list_ranks_ever_held() if not _left(service, rank)
    ]
    own = (_rank(service, rank, kept.get(rank, ())) for rank in here)
    return (*own, *reports_of_others(service, kept, here=set(here)))


def _left(service: SidecarService, rank: int) -> bool:
    held = service.node_host.copies.of_rank(rank)
    nothing = not held[Tier.MEMORY].shards and held[Tier.LOCAL].answer is TierAnswer.NONE
    return rank in service.slots.moved and nothing


def _rank(service: SidecarService, rank: int, kept: Collection[Shard]) -> ReportedRanks:
    """`kept`: the copies of the rank that this pod keeps for another pod, which has it now or had
    it before."""
    return ReportedRanks(
        ranks=Ranks.of((rank,)),
        world=service.node_host.copies.world_size_of_rank(rank),
        alive=service.leases.of(rank) is not None,
        staged=service.saving.get_rank_counters(rank).staged,
        tiers=_tiers(_own(service, rank), kept),
    )


def _tiers(held: RankReport, kept: Collection[Shard]) -> dict[Tier, ReportedTier]:
    """What each tier holds of a rank. Copies are listed by the pods that keep them. Others only say
    whether they know of any."""
    reports = {
        tier: replace(report, shards=()) if tier is Tier.PEER else report
        for tier, report in held.items()
    }
    return reports | _found({Tier.PEER: sorted(kept, key=lambda shard: shard.step_id)})


def _found(shards: Mapping[Tier, Sequence[Shard]]) -> dict[Tier, ReportedTier]:
    return {tier: ReportedTier.from_shards(found) for tier, found in shards.items() if found}


def _own(service: SidecarService, rank: int) -> RankReport:
    """What is held of a rank, without the steps of another run from which this run begins."""
    found: dict[Tier, ReportedTier] = {}
    for tier, held in service.node_host.copies.of_rank(rank).items():
        shards = service.node_host.epochs.without_foreign(held.shards)
        emptied = bool(held.shards) and not shards
        found[tier] = replace(
            held, shards=shards, answer=TierAnswer.NONE if emptied else held.answer
        )
    return found


def _volume(volume: Volume, measured: VolumeStatus) -> ReportedVolume:
    """A pod mounts each volume under its name. The run's directory lies below."""
    usage = _part_of(measured, VolumeUsage) | {"failed": volume.failed}
    return ReportedVolume(name=volume.root.parent.name, drive_id=volume.drive_id, **usage)


def _part_of(status: object, kind: type[Any]) -> dict[str, Any]:
    """Those fields of `status` that its base class `kind` has."""
    return {field.name: getattr(status, field.name) for field in fields(kind)}


# --- ranks of other pods ---------------------------------------------------------------------
#
# The archive belongs to the run, and each pod tells of its own ranks. If a pod is lost, what is
# known of its archived shards must not be lost with it. So the pods of the first and of the last
# rank also tell of all other ranks.


_MOST_STEPS = 100
_MOST_COPIES = 8192
"""What is told of the archive, newest steps first, is limited so that a report stays well below the
4 MiB that the leader accepts (a copy takes some 230 bytes). In a run with more ranks, each pod
tells only of its own."""


def reports_of_others(
    service: SidecarService, kept: Mapping[int, list[Shard]], *, here: Collection[int]
) -> tuple[ReportedRanks, ...]:
    """Ranks of other pods, of which this pod keeps a copy or knows an archived shard."""
    archived = _archived(service)
    ranks = sorted({*kept, *archived}.difference(here))
    return tuple(
        report_other_pods_rank(rank, kept.get(rank, ()), archived.get(rank, ())) for rank in ranks
    )


def report_other_pods_rank(
    rank: int, kept: Collection[Shard], archived: Sequence[Shard] = ()
) -> ReportedRanks:
    """A rank of another pod, of which this pod knows some shard."""
    newest = max([*kept, *archived], key=lambda shard: shard.step_id)
    return ReportedRanks(
        ranks=Ranks.of((rank,)),
        world=newest.world,
        alive=False,
        tiers=_tiers(_NOTHING, kept) | _found({Tier.ARCHIVE: archived}),
    )


def _archived(service: SidecarService) -> dict[int, list[Shard]]:
    node_host = service.node_host
    shards: dict[int, list[Shard]] = {}
    if Tier.ARCHIVE not in node_host.remotes.tiers:
        return shards
    left = _MOST_COPIES
    for step_id in sorted(node_host.remotes.complete_steps, reverse=True)[:_MOST_STEPS]:
        if _speaks_for_all(service, step_id):
            if (left := left - len(node_host.remotes.find_copies_by_rank(step_id))) < 0:
                break
            for rank, places in node_host.remotes.find_copies_by_rank(step_id).items():
                found = [source.shard for source in places if source.tier is Tier.ARCHIVE]
                shards.setdefault(rank, []).extend(node_host.epochs.without_foreign(found[:1]))
    return {rank: found for rank, found in shards.items() if found}


def _speaks_for_all(service: SidecarService, step_id: StepId) -> bool:
    world = service.node_host.copies.world_of(step_id)
    return world is not None and not {0, world - 1}.isdisjoint(
        service.node_host.copies.list_ranks_ever_held()
    )


# --- changes --------------------------------------------------------------------------------------
#
# A report is reduced to what changed since the one before it, if the leader knows that one.
# Without this, a run that has archived hundreds of steps would list them all in every report. What
# cannot be told as a change is told whole.


def reduce_to_changes(known: Report | None, now: Report) -> Report:
    """`now`, reduced to what changed since `known`, which the leader answered. It is whole if
    `known` is None, or if something that `known` named is no longer there. Ranks of which it says
    the same have one entry together."""
    if known is None or not _goes_on(known, now):
        return replace(now, ranks=merge_equal_reports(now.ranks))
    before = {rank.ranks: rank for rank in known.ranks}
    return replace(
        now,
        since=known.sequence,
        epochs=now.epochs[len(known.epochs) :],
        restores=now.restores[len(known.restores) :],
        goodput=None if now.goodput == known.goodput else now.goodput,
        ranks=merge_equal_reports(
            filter(None, (_changed(before.get(rank.ranks), rank) for rank in now.ranks))
        ),
    )


def _goes_on(known: Report, now: Report) -> bool:
    """Whether all that `known` named is still named: each epoch, restore, rank and tier."""
    after = {rank.ranks: rank.tiers.keys() for rank in now.ranks}
    return (
        known.started_at == now.started_at
        and known.ready == now.ready
        and now.epochs[: len(known.epochs)] == known.epochs
        and now.restores[: len(known.restores)] == known.restores
        and all(
            rank.ranks in after and rank.tiers.keys() <= after[rank.ranks] for rank in known.ranks
        )
    )


def _changed(before: ReportedRanks | None, now: ReportedRanks) -> ReportedRanks | None:
    """The rank with those of its tiers that changed; None if nothing did."""
    was = before.tiers if before is not None else {}
    moved = {tier: _moved(was.get(tier), tier_report) for tier, tier_report in now.tiers.items()}
    tiers = {tier: tier_report for tier, tier_report in moved.items() if tier_report is not None}
    if (archived := tiers.get(Tier.ARCHIVE)) is not None and _lists_the_newest(now):
        oldest, replaced = (
            min(shard.step_id for shard in now.shards(Tier.ARCHIVE)),
            {shard.step_id for shard in archived.shards},
        )
        gone = tuple(
            step_id for step_id in archived.gone or () if step_id > oldest or step_id in replaced
        )
        tiers[Tier.ARCHIVE] = replace(archived, gone=gone)
    if before is not None and not tiers and replace(before, tiers={}) == replace(now, tiers={}):
        return None
    return replace(now, tiers=tiers)


def _lists_the_newest(now: ReportedRanks) -> bool:
    """Whether this is a rank of another pod, of which only the newest archived steps are listed.
    Steps that are no longer named need not be gone then."""
    return bool(now.shards(Tier.ARCHIVE)) and not (now.alive or now.shards(*IN_POD))


def _moved(before: ReportedTier | None, now: ReportedTier) -> ReportedTier | None:
    """What came and what went; None if nothing did. If any image of a step changed, the step counts
    as gone and comes whole."""
    listed = before.shards if before is not None else ()
    touched = {group.step_id for group in {*listed} ^ {*now.shards}}
    if before is not None and not touched and before.answer is now.answer:
        return None
    return replace(
        now,
        shards=tuple(shard for shard in now.shards if shard.step_id in touched),
        gone=tuple(sorted({group.step_id for group in listed} & touched)),
    )


def strip_volatile_fields(report: Report) -> Report:
    """The report without what changes all the time and can wait for the next report. If it equals
    the last one, there is no news."""
    steady = (replace(volume, used_bytes=0, free_bytes=0) for volume in report.volumes)
    waiting = {tier: replace(progress, behind_s=0.0) for tier, progress in report.tiers.items()}
    return replace(
        report,
        sequence=0,
        volumes=tuple(steady),
        tiers=waiting,
        goodput=None,
    )


def pressing_news(fresh_report: Report) -> Report:
    """Of the `strip_volatile_fields` of a report, what other machines wait for: a commit needs the
    newest step that each rank has written, not what memory and buddies hold, nor what is
    deleted."""
    return replace(
        fresh_report,
        ranks=tuple(map(_pressing, fresh_report.ranks)),
        tiers={
            tier: RemoteTierProgress(where=progress.where, trouble=progress.trouble)
            for tier, progress in fresh_report.tiers.items()
        },
    )


def _pressing(report: ReportedRanks) -> ReportedRanks:
    tiers = {
        tier: replace(
            progress, shards=_newest(progress.shards) if tier in (Tier.LOCAL, Tier.ARCHIVE) else ()
        )
        for tier, progress in report.tiers.items()
    }
    return ReportedRanks(ranks=report.ranks, world=report.world, alive=report.alive, tiers=tiers)


def _newest(shards: Sequence[ShardsOfStep]) -> tuple[ShardsOfStep, ...]:
    return (max(shards, key=lambda shard: shard.step_id),) if shards else ()
