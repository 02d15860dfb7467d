"""The report of a run to the operator, from what its leader knows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from keepstep.core.commit_rule import each_rank
from keepstep.core.ledger import RestartAction
from keepstep.leader.advisories import current_advisories
from keepstep.leader.leader import Leader
from keepstep.leader.node_rank_states import NodeRankState
from keepstep.leader.orphaned_shards import NodeOrphanedShards
from keepstep.leader.run_ledger import RunLedger
from keepstep.spans import format_spans
from keepstep.steps import NEAREST_FIRST, StepId, Tier, TierAnswer
from keepstep.wire.run_reports import (
    LARGEST_BYTES,
    MOST_NODES,
    KeptStep,
    LeaderRecord,
    LossOutcome,
    MemberState,
    NodeHoldings,
    NodeReport,
    RunReport,
    SaveOverhead,
    cut_to_bounds,
)

SILENT_S: Final = 90.0
"""A member is silent after this time without a connection."""
_MOST_ARCHIVED: Final = 100


def build_run_report(leader: Leader, *, sequence: int, at: float) -> RunReport:
    """The run now. `sequence`: see `RunReport`; the first report has no record, because an earlier
    leader's is not known yet."""
    ledger, history, asked = leader.ledger, leader.history, leader.requests
    asked.note_orphans_for_operator()
    progress, commit = ledger.progress, history.commit
    step = progress.step if progress is not None else None
    behind = None if step is None else max(0, step - (commit.id.step if commit else 0))
    fresh = ledger.core.lineage.fresh
    there = [place for _, place in sorted(ledger.places.items()) if not place.gone]
    outlook, safe = asked.restart_outlook(), ledger.node_loss_outcome()
    watermarks = ledger.watermarks()
    if safe.step is not None and asked.policy.replicas:
        watermarks[Tier.PEER] = safe.step  # what is left whichever node is lost
    report = RunReport(
        leader=leader.life,
        sequence=sequence,
        world=ledger.world or 0,
        alive=ledger.count_live_ranks(),
        known=len(ledger.places),
        missing=format_spans(_silent(leader, at)),
        without_library=format_spans(
            rank
            for rank, place in ledger.places.items()
            if not place.gone and not place.sidecar.library
        ),
        settled=leader.have_all_members_reported,
        epochs=tuple(sorted(ledger.core.epochs, key=lambda epoch: epoch.id, reverse=True)),
        fresh=str(fresh or ""),
        origin=next(
            (f"{epoch.origin}/{epoch.parent}" for epoch in ledger.core.epochs if epoch.origin), ""
        ),
        step=step,
        behind=behind,
        committed=commit.id if commit is not None else None,
        commits=ledger.commits(),
        watermarks=watermarks,
        held_by=_holders_of(ledger, commit.id if commit is not None else None),
        kept=tuple(_kept(leader)),
        certain=_is_certain(leader),
        archived=len(ledger.archived()),
        safe=LossOutcome(
            restart=outlook.step if outlook.restart is RestartAction.GOES_ON else None,
            node=safe.step,
            pod=safe.pod,
            archived=safe.archived,
            sole=tuple(sorted(safe.sole)),
        ),
        stall=_stall(there),
        fullest=_fullest(there),
        sidecar=_versions(place.sidecar.sidecar for place in there),
        library=_versions(place.sidecar.library for place in there),
        pinned=max((place.sidecar.pinned for place in there), default=""),
        refusals=max((place.sidecar.refusals for place in there), default=0),
        restore_known=leader.is_restore_step_known(),
        acknowledged=str(asked.fresh.acknowledged or ""),
        nodes=tuple(_nodes(leader, at)),
        recent=history.recent,
        alarms=history.list_recent_alarms(at=at),
        doubts=current_advisories(leader, behind=behind, at=at),
        record=_record(leader, at) if sequence > 1 else LeaderRecord(),
    )
    return cut_to_bounds(report)


def fit_to_size(report: RunReport, size: Callable[[RunReport], int]) -> RunReport:
    """The report, without the ends of its longest lists if it is larger than `LARGEST_BYTES`.
    `size`: in bytes as it is sent."""
    while size(report) > LARGEST_BYTES:
        record = report.record
        report = replace(
            report,
            certain=False,
            kept=_half(report.kept),
            nodes=_half(report.nodes),
            record=replace(record, holders=_half(record.holders), drives=_half(record.drives)),
        )
    return report


def _half(listed: tuple) -> tuple:  # type: ignore[type-arg]
    return listed[: len(listed) // 2]


def _versions(versions: Iterable[str]) -> str:
    return ", ".join(sorted({*versions} - {""}))


def _fullest(there: Iterable[NodeRankState]) -> float | None:
    """The largest part of a volume that is used."""
    volumes = [volume for place in there for volume in place.sidecar.volumes if volume.used_bytes]
    return max(
        (
            volume.used_bytes / (volume.capacity_bytes or volume.used_bytes + volume.free_bytes)
            for volume in volumes
        ),
        default=None,
    )


def _stall(there: Iterable[NodeRankState]) -> SaveOverhead:
    stalls = [place.sidecar.stall for place in there]
    return SaveOverhead(
        skipped=sum(counts.skipped for counts in stalls),
        discarded=sum(counts.discarded for counts in stalls),
        blocked_seconds=round(sum(counts.blocked_seconds for counts in stalls), 1),
    )


# --- node ranks ----------------------------------------------------------------------------------


def _silent(leader: Leader, at: float) -> Iterator[int]:
    """The node ranks that are not connected: since long, or since this leader began."""
    for rank in leader.list_unconnected_node_ranks():
        place = leader.ledger.places.get(rank)
        if place is None or at - place.reported_at >= SILENT_S:
            yield rank


def _nodes(leader: Leader, at: float) -> list[NodeReport]:
    """Those with warnings first, then by node rank."""
    ring, silent = leader.peers().ring, {*_silent(leader, at)}
    places = sorted(
        leader.ledger.places.items(), key=lambda place: (not place[1].sidecar.warnings, place[0])
    )
    return [
        NodeReport(
            node_rank=rank,
            pod=place.pod,
            node=place.node,
            state=_state(place, rank in silent),
            ranks=format_spans(each_rank(place.own_ranks)),
            memory=None if place.gone else _newest(leader.ledger, rank, Tier.MEMORY),
            local=None if place.dropped else _newest(leader.ledger, rank, Tier.LOCAL),
            buddies=format_spans(ring.get(rank, ())),
            warnings=place.sidecar.warnings,
        )
        for rank, place in places[:MOST_NODES]
    ]


def _state(place: NodeRankState, silent: bool) -> MemberState:
    if place.gone:
        return MemberState.GONE
    return MemberState.SILENT if silent else MemberState.CONNECTED


def _newest(ledger: RunLedger, node_rank: int, tier: Tier) -> int | None:
    """Steps that a later epoch left behind do not count."""
    held = ledger.list_node_complete_steps(node_rank, tier)
    return max((step_id.step for step_id in held if not ledger.core.is_dead(step_id)), default=None)


# --- steps ---------------------------------------------------------------------------------------


def _holders_of(ledger: RunLedger, step_id: StepId | None) -> tuple[Tier, ...]:
    """The tiers that hold this step of all ranks."""
    if step_id is None or not ledger.world:
        return ()
    return tuple(
        tier
        for tier in NEAREST_FIRST
        if ledger.core.compute_rank_mask_on_tier(step_id, tier).bit_count() >= ledger.world
    )


def _kept(leader: Leader) -> Iterator[KeptStep]:
    """The newest archived steps, and all pinned ones that are complete; newest first."""
    ledger, pins = leader.ledger, {*leader.pins.steps}
    archived = ledger.archived()[-_MOST_ARCHIVED:]
    for step_id in sorted({*archived, *(pins & {*ledger.commits()})}, reverse=True):
        held = {
            tier: ledger.core.compute_rank_mask_on_tier(step_id, tier).bit_count()
            for tier in NEAREST_FIRST[1:]
        }
        world = max(held.values())
        yield KeptStep(
            step=str(step_id),
            ranks=max(1, world),
            tiers=tuple(tier for tier, count in held.items() if count >= world),
            size_bytes=ledger.core.size_bytes(step_id),
        )


def _is_certain(leader: Leader) -> bool:
    """Whether a step that is not kept certainly does not exist: all have reported, and where there
    is an archive, it has answered."""
    if not leader.have_all_members_reported:
        return False
    if leader.requests.policy.archive_every is None:
        return True
    answers = {
        answer
        for place in leader.ledger.places.iterate_present_states()
        for answer in place.ranks.archive
    }
    return TierAnswer.UNKNOWN not in answers and bool(answers)


# --- the record ----------------------------------------------------------------------------------


def _record(leader: Leader, at: float) -> LeaderRecord:
    record = leader.history.make_leader_record(_holders(leader), at=at)
    return replace(record, restore_from=leader.requests.restore_from)


def _holders(leader: Leader) -> tuple[NodeHoldings, ...]:
    """What each node holds on drives that outlive pods. Nodes that the run has left come first,
    because nothing else remembers what lies there."""
    places = leader.ledger.places
    place_of = {bit: rank for rank, place in places.items() for bit in each_rank(place.own_ranks)}
    by_node: dict[str, dict[int, NodeRankState]] = {}
    for node_rank, place in places.items():
        if place.stays and not place.dropped:
            by_node.setdefault(place.node, {})[node_rank] = place
    left: dict[str, list[NodeOrphanedShards]] = {}
    for orphan in leader.ledger.orphans:
        by_node.setdefault(orphan.node, {})
        left.setdefault(orphan.node, []).append(orphan)
    found = (
        _holder(leader.ledger, node, at, place_of, left.get(node, ()))
        for node, at in sorted(by_node.items(), key=lambda item: (item[0] not in left, item[0]))
    )
    return tuple(holder for holder in found if holder.node_ranks or holder.copies)


def _holder(
    ledger: RunLedger,
    node: str,
    places: dict[int, NodeRankState],
    place_of: dict[int, int],
    left: Iterable[NodeOrphanedShards],
) -> NodeHoldings:
    """One node. `left`: the shards on it of places that are elsewhere now."""
    steps = [step_id for rank in places for step_id in ledger.find_steps_on_drives(rank)]
    newest = max((*steps, *(shard.step for shard in left)), default=None)
    own = {
        rank
        for rank, place in places.items()
        if place.own_ranks and any(ledger.core.copies_of_node(rank, Tier.LOCAL))
    }
    copied = (rank for place in places.values() for rank in each_rank(place.ranks.copied))
    return NodeHoldings(
        node=node,
        node_ranks=format_spans(own | {shard.node_rank for shard in left}),
        copies=format_spans(place_of[rank] for rank in copied if rank in place_of),
        step=None if newest is None else newest.step,
    )
