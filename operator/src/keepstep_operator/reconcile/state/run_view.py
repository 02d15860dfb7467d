"""A run at one moment, as values. Its status and its Checkpoint objects are made from them.

The run goes on changing, a view does not. A view has no ages and no "now", so two views are equal
if nothing happened to the run between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from keepstep.core.ledger import Outlook, Restart
from keepstep.leader.node_rank import Place
from keepstep.leader.orphaned_shards import OrphanedShard
from keepstep.leader.run_ledger import Safety
from keepstep.steps import NEAREST_FIRST, Answer, EpochId, StepId, Tier
from keepstep_operator.api.model import Job, PodRecord, PolicyRecord, RunKey
from keepstep_operator.api.policy import Policy, VolumeKind
from keepstep_operator.api.run import (
    MOST_HOLDERS,
    MOST_RANKS,
    Condition,
    DriveStatus,
    GoodputStatus,
    RecentStatus,
    RestoreFromStatus,
    RunStatus,
    StallStatus,
)
from keepstep_operator.reconcile.state import left_shards
from keepstep_operator.reconcile.state.durability import Survives, survives
from keepstep_operator.reconcile.state.health import Health
from keepstep_operator.reconcile.state.previous_status import Commit, parse_steps
from keepstep_operator.reconcile.state.restore_request import Stage

if TYPE_CHECKING:
    from keepstep_operator.reconcile.state.run import Run

MOST_ARCHIVED = 100


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What people are told of a run. `pods` is by uid, `places` by node rank; steps are oldest
    first.

    `epoch`: the newest epoch whose restart was counted, so that a later reconciler does not count
    it again. `fresh`: the epoch that began at step 0 although older steps exist. `origin`: run and
    step that a fork began from. `tiers`: the tiers that hold the newest commit of every rank.
    `newest`: by node rank and tier, the newest step that all ranks of its own hold there; only for
    the node ranks that are shown. `on_drives`: by node rank, the newest step of which its drives
    hold any image, its own or a copy. `own_drives`: node ranks whose drives hold shards of their
    own. `slowest`: if commits stall, the pod that is the farthest behind. `served`, `unserved`: on
    which nodes agents serve shards of pods that left, and on which not. `outlook`: what a restart
    does now. `gone_for_good`: the run begins again where a part of every step is gone.
    `other_drives`: where other file systems lie than those of the run's shards. `drives`: those
    of the shards. `settled`: what no pod reports is certainly not there. `rivals`: for each pod
    of another job with the run's label, what to do about it. `commit_lost`: the last commit, if
    a part of it is gone. `refusals`, `refused`: how often the ranks' own vote refused since the
    last restore, and why.
    """

    key: RunKey
    generation: int
    job: Job | None
    policy: Policy | None
    policy_now: PolicyRecord | None
    pods: Mapping[str, PodRecord]
    places: Mapping[int, Place]
    health: Health
    finished: bool
    past: RunStatus | None
    conditions: tuple[Condition, ...]
    recent: tuple[RecentStatus, ...]
    alarms: tuple[str, ...]
    earlier: RunKey | None
    rivals: tuple[str, ...]
    volumes: tuple[VolumeKind, ...]
    world: int
    alive: int
    step: int | None
    behind: int | None
    commit: Commit | None
    commits: tuple[StepId, ...]
    archived: tuple[StepId, ...]
    watermarks: Mapping[Tier, StepId]
    outlook: Outlook
    gone_for_good: bool
    other_drives: str
    settled: bool
    commit_lost: StepId | None
    refusals: int
    refused: str
    doubt: str
    safety: Safety
    survives: tuple[Survives, ...]
    epoch: EpochId | None
    fresh: EpochId | None
    origin: str
    tiers: tuple[Tier, ...]
    newest: Mapping[tuple[int, Tier], int]
    on_drives: Mapping[int, StepId]
    own_drives: frozenset[int]
    slowest: str
    stall: StallStatus
    restarts: int
    lost_steps: int
    goodput: GoodputStatus | None
    buddies: Mapping[int, tuple[int, ...]]
    orphans: tuple[OrphanedShard, ...]
    drives: tuple[DriveStatus, ...]
    served: str
    unserved: str
    restore_stage: Stage
    restore_known: bool
    restore_step: StepId | None
    restore_from: RestoreFromStatus | None

    @property
    def committed(self) -> StepId | None:
        """The newest step that is durable on every rank, as far as reports show now; None: no
        step."""
        return self.commits[-1] if self.commits else None


def view_of(run: Run) -> RunView:
    """The view of the run as it is now."""
    ledger, restores = run.ledger, run.restores
    safety, commits, watermarks = ledger.safety(), ledger.commits(), ledger.watermarks()
    if safety.step is not None and run.policy is not None and run.policy.peers is not None:
        watermarks[Tier.PEER] = safety.step  # what is left whichever node is lost
    outlook, (refusals, refused) = run.outlook(), run.refusals()
    origins = (f"{one.origin}/{one.parent}" for one in ledger.core.epochs if one.origin)
    ranks = [rank for place in ledger.places.there() for rank in place.ranks.values()]
    staying = [rank for rank, place in ledger.places.items() if place.stays and not place.dropped]
    drives = {rank: max(ledger.drives(rank), default=None) for rank in staying}
    return RunView(
        key=run.key,
        generation=run.generation,
        job=run.job,
        policy=run.policy,
        policy_now=run.policy_now,
        pods=dict(run.pods),
        places=dict(sorted(ledger.places.items())),
        health=run.health,
        finished=run.finished_at is not None,
        past=run.past.status if run.past is not None else None,
        conditions=tuple(run.written.conditions),
        recent=tuple(run.recent),
        alarms=run.alarms,
        earlier=run.earlier,
        rivals=tuple(run.refusal(uid) for uid, pod in sorted(run.rivals.items()) if pod.stays),
        volumes=run.volumes,
        world=ledger.world or 0,
        alive=ledger.alive(),
        step=run.step,
        behind=run.behind,
        commit=run.commit,
        commits=commits,
        archived=ledger.archived(),
        watermarks=watermarks,
        outlook=outlook,
        gone_for_good=run.gone_for_good,
        other_drives=run.other_drives(),
        settled=ledger.settled,
        commit_lost=run.commit_lost,
        refusals=refusals,
        refused=refused,
        doubt=ledger.doubt() if Tier.MEMORY not in watermarks else "",
        safety=safety,
        survives=survives(
            common=outlook.restart is Restart.GOES_ON,
            committed=bool(commits),
            spread=safety.step is not None,
            apart=safety.pod is not None,
            archived=safety.archived is not None,
            kinds=run.volumes,
            labelled=run.labelled,
        ),
        epoch=(restores.waiting and restores.counted)
        or ledger.core.lineage.current
        or restores.counted,
        fresh=ledger.core.lineage.fresh,
        origin=next(origins, ""),
        tiers=tuple(_tiers(run)),
        newest=dict(_newest(run)),
        on_drives={rank: step for rank, step in drives.items() if step is not None},
        own_drives=frozenset(rank for rank in drives if any(ledger.core.of_node(rank, Tier.LOCAL))),
        slowest=_slowest(run) if run.health.stalled else "",
        stall=StallStatus(
            skipped=sum(rank.skipped for rank in ranks),
            discarded=sum(rank.discarded for rank in ranks),
            blocked_seconds=round(sum(rank.blocked_s for rank in ranks), 1),
        ),
        restarts=restores.restarts,
        lost_steps=restores.lost_steps,
        goodput=run.goodput.status(),
        buddies=run.peer_assignment.ring(),
        orphans=tuple(ledger.orphans),
        drives=tuple(run.drives.rows(most=MOST_HOLDERS)),
        served=left_shards.served(run),
        unserved=left_shards.unserved(run),
        restore_stage=run.restore_request.stage,
        restore_known=run.restore_request.is_known_by(place.pod for place in ledger.places.there()),
        restore_step=run.restore_request.id,
        restore_from=run.restore_request.status(),
    )


def _tiers(run: Run) -> Iterator[Tier]:
    if run.commit is not None and run.ledger.world:
        for tier in NEAREST_FIRST:
            if run.ledger.core.holders(run.commit.id, tier).bit_count() >= run.ledger.world:
                yield tier


def _newest(run: Run) -> Iterator[tuple[tuple[int, Tier], int]]:
    """See `RunView.newest`. Steps that a later epoch left behind do not count."""
    for node_rank, place in sorted(run.ledger.places.items())[:MOST_RANKS]:
        for tier, lost in ((Tier.MEMORY, place.gone), (Tier.LOCAL, place.dropped)):
            held = () if lost else run.ledger.common(node_rank, tier)
            steps = [id.step for id in held if not run.ledger.core.is_dead(id)]
            if steps:
                yield (node_rank, tier), max(steps)


def _slowest(run: Run) -> str:
    """The pod whose newest step on local is the oldest."""
    newest = {
        run.pods[place.pod].name: run.ledger.oldest_newest(node_rank)
        for node_rank, place in run.ledger.places.items()
        if place.pod in run.pods and place.ranks
    }
    return min(newest, key=lambda name: (newest[name], name), default="")


# --- what Checkpoint objects are made from ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KeptStep:
    """A complete step. `tiers`: the tiers that each hold all its shards. `bytes`: the size of one
    copy; 0 while it is unknown or was not computed (`measured`)."""

    run: str
    step: str
    ranks: int
    tiers: tuple[str, ...]
    bytes: int = 0

    @property
    def name(self) -> str:
        """The name of its object. It is a DNS subdomain, since both parts are."""
        return f"{self.run}-{self.step}"


def kept_steps(run: Run) -> tuple[KeptStep, ...]:
    """The steps that get an object, newest first: the newest ones in the archive, and all pinned
    steps that are complete."""
    archived = run.ledger.archived()[-MOST_ARCHIVED:]
    pins = set(parse_steps(run.object.pins)) if run.object else set()
    found = sorted({*archived, *(pins & {*run.ledger.commits()})}, reverse=True)
    return tuple(_kept(run, id) for id in found)


def _kept(run: Run, id: StepId) -> KeptStep:
    ledger = run.ledger.core
    holders = {tier: ledger.holders(id, tier).bit_count() for tier in NEAREST_FIRST[1:]}
    world = max(holders.values())
    tiers = tuple(str(tier) for tier, count in holders.items() if count >= world)
    return KeptStep(
        run=run.key.name,
        step=str(id),
        ranks=max(1, world),
        tiers=tiers,
    )


def measured(run: Run, one: KeptStep) -> KeptStep:
    """The same with its bytes. They are summed up over all ranks, so this is done only for an
    object that is created."""
    return replace(one, bytes=run.ledger.core.size_bytes(StepId.parse(one.step)))


def is_certain(run: Run) -> bool:
    """Whether a step that is not reported certainly does not exist: all ranks have reported, and
    where the policy has an archive, it has answered."""
    if run.policy is None or not run.ledger.settled:
        return False
    if run.policy.archive is None:
        return True
    ranks = (one for place in run.ledger.places.there() for one in place.ranks.values())
    said = {one.archive_answer for one in ranks}
    return Answer.UNKNOWN not in said and bool(said - {None})
