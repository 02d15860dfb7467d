"""What a report says: one look at everything that this sidecar knows. Sends nothing.

Apart from `reporter`, which decides when to look and knows how to send.
"""

from __future__ import annotations

import time
from dataclasses import replace

from keepstep.ledger import RankReport
from keepstep.reports import Report, ReportedDepot, ReportedRank, ReportedVolume
from keepstep.status import DepotStatus, VolumeStatus
from keepstep.steps import Answer, Epoch, Tier
from keepstep_sidecar import __version__
from keepstep_sidecar import status as look
from keepstep_sidecar.elsewhere import others
from keepstep_sidecar.service import Service
from keepstep_sidecar.volume import Volume

_RESTART_S = 120.0
"""A trainer that does not come back by then will find the operator's plan anyway."""
_WARNINGS = 10
_WARNING_CHARACTERS = 500


def urgent(service: Service) -> bool:
    """Whether the operator's answer is wanted soon: a trainer waits for a commit or to hear what
    the other pods have, or a rank that holds something has just lost its trainer and will restore
    whatever they have, too."""
    recent = time.monotonic() - service.trainers.changed_at < _RESTART_S
    restoring = any(service.trainers.restores(rank) for rank in service.catalog.ranks())
    beyond = service.beyond
    awaited = service.progress.awaited > 0 or bool(beyond.awaits) or beyond.asking
    return awaited or (recent and restoring)


def report(service: Service, volumes: tuple[VolumeStatus, ...], *, sequence: int) -> Report:
    """The whole report. `volumes`: measured a moment ago, as that may block."""
    counts, totals = service.persister.counts, service.persister.totals
    catalog = service.catalog
    return Report(
        sidecar=__version__,
        started_at=service.started_at,
        sequence=sequence,
        sent_at=time.time(),
        ready=catalog.scanned,
        library=service.trainers.library,
        pinned=_pinned(service),
        epochs=_epochs(service),
        ranks=(*(_rank(service, rank) for rank in catalog.ranks()), *others(service)),
        restores=tuple(service.restores),
        volumes=tuple(map(_volume, catalog.volumes.volumes, volumes)),
        warnings=tuple(text[:_WARNING_CHARACTERS] for text in look.warnings(service)[:_WARNINGS]),
        persisted=counts.persisted,
        persist_skipped=counts.skipped + counts.abandoned,
        persist_bytes=totals.bytes,
        persist_seconds=totals.seconds,
        flushing=service.flushing,
        peer_address=service.beyond.address,
        depots=tuple(_depot(one) for one in service.beyond.statuses()),
    )


def news(report: Report) -> Report:
    """The report without what changes all the time and interests nobody: equal, no news."""
    steady = (replace(one, used_bytes=0, free_bytes=0) for one in report.volumes)
    waiting = (replace(one, behind_s=0.0) for one in report.depots)
    return replace(report, sequence=0, sent_at=0.0, volumes=tuple(steady), depots=tuple(waiting))


def _pinned(service: Service) -> str:
    return look.locked(service) if any(service.keeper.files()) else ""


def _epochs(service: Service) -> tuple[Epoch, ...]:
    """On record, and the one that a live trainer says it works in."""
    recorded, current = service.catalog.ledger.epochs, service.catalog.epoch
    unrecorded = current is not None and current.id not in {one.id for one in recorded}
    return (*recorded, current) if current is not None and unrecorded else recorded


def _rank(service: Service, rank: int) -> ReportedRank:
    held, counters = _own(service, service.catalog.telling.of_rank(rank)), service.trainers.of(rank)
    return ReportedRank(
        rank=rank,
        world=service.catalog.telling.world(rank),
        alive=service.trainers.leases.of(rank) is not None,
        memory=held.sealed[Tier.MEMORY],
        local=held.sealed[Tier.LOCAL],
        memory_answer=held.answers[Tier.MEMORY],
        local_answer=held.answers[Tier.LOCAL],
        staged=counters.staged,
        staged_at=counters.staged_at,
        saves=counters.saves,
        skipped=sum(counters.skipped.values()),
        discarded=counters.discarded,
        blocked_s=counters.blocked_s,
        archive=held.sealed.get(Tier.ARCHIVE, ()),
        archive_answer=held.answers.get(Tier.ARCHIVE),
        # the pods that keep the copies list them; this one only says whether it knows of any
        peer_answer=held.answers.get(Tier.PEER),
    )


def _own(service: Service, held: RankReport) -> RankReport:
    """Without the steps of another run that this one begins from."""
    sealed = {tier: service.catalog.ancestry.own(found) for tier, found in held.sealed.items()}
    emptied = [tier for tier, found in sealed.items() if not found and held.sealed[tier]]
    return RankReport(
        sealed=sealed, answers={**held.answers, **dict.fromkeys(emptied, Answer.NONE)}
    )


def _volume(volume: Volume, measured: VolumeStatus) -> ReportedVolume:
    """A pod mounts each volume under its name; the run's directory lies below."""
    return ReportedVolume(
        name=volume.root.parent.name,
        engine=measured.engine,
        used_bytes=measured.used_bytes,
        free_bytes=measured.free_bytes,
        capacity_bytes=measured.capacity_bytes,
        failed=volume.failed,
        quarantined=measured.quarantined,
    )


def _depot(one: DepotStatus) -> ReportedDepot:
    return ReportedDepot(
        tier=one.tier,
        where=one.where,
        sent=one.sent,
        sent_bytes=one.sent_bytes,
        failures=one.failures,
        backlog=one.backlog,
        behind_s=one.behind_s,
        trouble=one.trouble,
    )
