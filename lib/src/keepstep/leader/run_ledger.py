"""The ledger of one run, and the last report of each node rank: the duties that docs/protocol.md
gives to the host of a ledger.

Reports may come late, twice, from a replaced sidecar, or from a pod that is being deleted. This
module puts them in order, and removes from the ledger what is lost with a pod. It compares no times
but those of the reconciler's own clock, which are passed in.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from keepstep.core.commit_rule import (
    RankReport,
    RanksReport,
    ReportedTier,
    StepImagesAtPlace,
    each_rank,
)
from keepstep.core.ledger import (
    Action,
    FreshStartAcknowledged,
    Ledger,
    LedgerConfig,
    Reported,
    ReportedHoldingsLost,
)
from keepstep.core.retention import Retention
from keepstep.core.shard import Ranks
from keepstep.leader.node_loss_outlook import (
    Sole,
    find_steps_surviving_loss,
    least_restart_step,
    sole_nodes,
)
from keepstep.leader.node_rank_states import (
    NodeRankState,
    NodeRankStates,
    ReportedRankBitmaps,
    ReportingPod,
    is_only_of_copies,
    is_report_applicable,
    is_stale_report,
    state_after_report,
)
from keepstep.leader.orphaned_shards import OrphanedShards
from keepstep.steps import IN_POD, Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import Report, ReportedRanks

MOST_ARCHIVED = 4096
"""The most archived steps that count: the newest do, and older ones are left alone."""


@dataclass(frozen=True, kw_only=True)
class NodeLossOutcome:
    """What the loss of one node would leave.

    `step`: the step that a restart goes on from at the least, whichever node is lost; it may be the
    archived one. `pod`: the same for the loss of any single pod with its volumes. `archived`: the
    newest archived step. `sole`: nodes that hold the only copy of some part of the newest commit.
    `find_steps_surviving_loss`: for each node, the newest step that survives its loss.
    """

    step: StepId | None = None
    pod: StepId | None = None
    archived: StepId | None = None
    sole: frozenset[str] = frozenset()


class RunLedger:
    """The ledger of one run and the places that feed it."""

    def __init__(self) -> None:
        self._keep = Retention()
        self._config = LedgerConfig()
        self.core = Ledger(self._config)
        self.places = NodeRankStates()
        self.orphans = OrphanedShards()
        self.progress: StepId | None = None
        self._answers: dict[int, int] = {}
        """By node rank, the ranks that it has named since its volumes were scanned, as a bitmap."""
        self._asked: set[int] = set()
        """Node ranks whose next report must be whole."""
        self._ordered = 0
        self._changes = 0
        self._safety: tuple[int, NodeLossOutcome] | None = None

    # --- changing ------------------------------------------------------------------------

    def configure(
        self, *, keep: Retention, pins: Iterable[StepId], beyond: Iterable[Tier] = ()
    ) -> None:
        """Set what the policy and the CheckpointRun ask to keep on local.

        `beyond`: the tiers that the policy asks for. The shared ones of these must have answered,
        too, before a start at step 0 is right. Peers need not have answered: copies on peers are
        reported by the pods that keep them, and no pod can say that there are none.
        """
        shared = (tier for tier in beyond if tier.shared)
        self._configure(replace(self._config, tiers=(*IN_POD, *shared)))
        self._keep = replace(keep, pinned=frozenset(pins))

    def take(self, sender: ReportingPod, report: Report, *, at: float) -> bool:
        """Take in one report; `actions` says what follows. Returns False if a newer report of this
        node rank is known already, or if a report of changes cannot be used."""
        self._changes += 1
        place = self.places.get(sender.node_rank)
        if place is not None and is_stale_report(place, sender, report):
            return False
        if report.since and (place is None or not is_report_applicable(place, sender, report)):
            self._asked.add(sender.node_rank)
            return False
        self._asked.discard(sender.node_rank) if not report.since else None
        if place is not None and place.pod != sender.pod:
            # the watermark is lost with the first pod that moves; the others left the same step
            commit = self.core.watermark(Tier.LOCAL) or self.orphans.newest
            newest = max(self.find_steps_on_drives(sender.node_rank), default=None)
            self.orphans.record_place_move(
                sender.node_rank, place, to=sender.node, commit=commit, newest=newest
            )
            stays = sender.local_stays and place.node == sender.node
            self.pod_gone(place.pod, local_stays=stays)
            place = None
        if report.ready:
            self.orphans.back(sender.node_rank, sender.node)
        self._forget_unnamed(sender.node_rank, report)
        self._apply(sender.node_rank, report)
        now = self.places[sender.node_rank] = self._renewed(place, sender, report, at)
        if (
            place is not None
            and report.since
            and now.archive_reporting_ranks & ~place.archive_reporting_ranks
        ):
            self._asked.add(sender.node_rank)  # others may have been believed
        if place is not None and place.archive_reporting_ranks & ~now.archive_reporting_ranks:
            self._ask_all()
        self._know_world()
        self._advance()
        return True

    def actions(self) -> tuple[Action, ...]:
        """What follows from all changes since the last call."""
        return self.core.actions()

    def _apply(self, node_rank: int, report: Report) -> None:
        self._ordered += 1
        event = report.to_ledger_event(node_rank, ordered=self._ordered)
        if any(Tier.ARCHIVE in rank.tiers and is_only_of_copies(rank) for rank in report.ranks):
            version = self._answered(node_rank)
            ranks = (found for rank in report.ranks for found in self._of(node_rank, rank, version))
            event = replace(event, ranks=tuple(ranks))
        self.core.apply_event(event)
        self.core.trim_archived_steps(MOST_ARCHIVED)

    def _of(self, node_rank: int, reported: ReportedRanks, version: int) -> Iterator[RanksReport]:
        """What to believe of this entry; of each rank alone where it tells of the archive."""
        if Tier.ARCHIVE not in reported.tiers or not is_only_of_copies(reported):
            yield reported
            return
        for rank, report in reported.each():
            if self._only_kept(node_rank, rank, report):
                report = replace(report, tiers=self._believed(rank, report, version))
            yield report

    def _only_kept(self, node_rank: int, rank: int, report: ReportedRanks) -> bool:
        """As `is_only_of_copies`, but also right for a report of changes only."""
        return not any(
            self.core.held_ranks_bitmap(node_rank, tier) >> rank & 1
            for tier in IN_POD
            if tier not in report.tiers or report.tiers[tier].gone is not None
        )

    def _believed(self, rank: int, report: ReportedRanks, version: int) -> RankReport:
        """What to believe of a pod that reports archived steps of a rank that is not its own.

        Each rank's own pod knows all archived steps of that rank. The pods of the first and the
        last rank report archived steps of all ranks, but in a large run only the newest ones. This
        must not make the older ones look gone. `version`: ranks whose own pods exist and have
        reported.
        """
        if version >> rank & 1:
            return {
                tier: tier_report
                for tier, tier_report in report.tiers.items()
                if tier is not Tier.ARCHIVE
            }
        archived = report.tiers[Tier.ARCHIVE]
        named = {held.step_id for held in archived.shards}
        if archived.gone is not None or not named:
            return report.tiers
        there = self.core.archived_of(rank)
        gone = tuple(step_id for step_id in there if step_id > min(named) and step_id not in named)
        return {**report.tiers, Tier.ARCHIVE: replace(archived, gone=gone)}

    def _renewed(
        self, place: NodeRankState | None, sender: ReportingPod, report: Report, at: float
    ) -> NodeRankState:
        """The place after this report, which the ledger has already taken in."""
        before = place if report.since else None
        held = {
            tier: self.core.held_ranks_bitmap(sender.node_rank, tier)
            for tier in (*IN_POD, Tier.PEER)
        }
        ranks = (before.ranks if before is not None else ReportedRankBitmaps()).after(
            report.ranks, held
        )
        epochs = (*before.epochs, *report.epochs) if before is not None else report.epochs
        if epochs == self.core.epochs:
            epochs = self.core.epochs  # one tuple for all places
        return state_after_report(sender, report, at, epochs=epochs, ranks=ranks)

    def pod_gone(self, pod: str, *, local_stays: bool) -> None:
        """The pod is gone, and its memory with it. `local_stays`: its volumes outlive it."""
        self._changes += 1
        for node_rank, place in self.places.items():
            if place.pod == pod and not place.dropped:
                self.places[node_rank] = replace(place, gone=True, dropped=not local_stays)
                self._ask_all()
                if not local_stays:
                    self._answers.pop(node_rank, None)
                    self.core.apply_event(ReportedHoldingsLost(node_rank))
                    self._forget_epochs()
                elif not place.gone:
                    self._memory_gone(node_rank)
                return

    def request_full_report(self, node_rank: int) -> None:
        """Ask this node rank for a whole report."""
        self._asked.add(node_rank)

    def _ask_all(self) -> None:
        """Ask all node ranks for whole reports. A pod that reported archived steps no longer does
        so; the other pods, which were not believed about its ranks, must say again what they
        know."""
        self._asked.update(self.places)

    def acknowledge_fresh_start(self, epoch: EpochId) -> None:
        """A person confirms that this epoch rightly began at step 0."""
        self.core.apply_event(FreshStartAcknowledged(epoch))

    def _memory_gone(self, node_rank: int) -> None:
        lost = {Tier.MEMORY: ReportedTier(answer=TierAnswer.UNKNOWN)}
        own = Ranks.of(each_rank(self.places[node_rank].own_ranks))
        self._ordered += 1
        event = Reported(
            node_rank=node_rank,
            ranks=(RanksReport(ranks=own, tiers=lost),),
            sequence=self._ordered,
        )
        self.core.apply_event(event)

    def _forget_unnamed(self, node_rank: int, report: Report) -> None:
        """Remove the ranks that this node had and, after the scan of its volumes, no longer has."""
        named = report.reported_ranks
        known = self._answers.get(node_rank, 0)
        if report.ready and not report.since:
            for rank in each_rank(known & ~named):
                self.core.apply_event(ReportedHoldingsLost(node_rank, rank))
            known = 0
        self._answers[node_rank] = known | named

    def _forget_epochs(self) -> None:
        """Forget epochs of which no pod has a record any more: they must not outrank an epoch that
        begins anew. If anything is archived, no epoch is forgotten, since the archive has its
        epochs on record."""
        if self.archived():
            return
        on_record = self._on_record()
        recorded = {epoch.id for epoch in on_record}
        if any(epoch.id not in recorded for epoch in self.core.epochs):
            self.core.keep_epochs(on_record)

    def _on_record(self) -> list[Epoch]:
        """All epochs on record at the places that are not dropped."""
        places = self.places.values()
        return [epoch for place in places if not place.dropped for epoch in place.epochs]

    def _answered(self, but: int) -> int:
        """Ranks whose own pods exist and have reported what is archived, as a bitmap. The pod of
        node rank `but` does not count."""
        found = 0
        for at, place in self.places.items():
            found |= place.archive_reporting_ranks if at != but and not place.gone else 0
        return found

    def _know_world(self) -> None:
        worlds = self.places.worlds
        living = [world for alive, world in worlds if alive]
        world = max(living or [world for _, world in worlds], default=None)
        if world != self._config.world:
            self._configure(replace(self._config, world=world))

    def _configure(self, config: LedgerConfig) -> None:
        self._config = self.core.config = config

    def _advance(self) -> None:
        """Renew `progress`: the newest step that all ranks staged, or else the step that the newest
        epoch went on from."""
        current = self.core.lineage.current_epoch
        if current is None:
            return
        staged = self._staged(current)
        if staged is None:
            parent = self.core.find_parent_step(current)
            staged = parent.step if parent else 0
        here = StepId(current, staged)
        # A new epoch always replaces the old one. If all records were lost, its number may be
        # lower.
        known = self.progress
        if known is None or known.epoch != current or here > known:
            self.progress = here

    def _staged(self, epoch: EpochId) -> int | None:
        """The newest step of this epoch such that each rank of the world has staged it or a newer
        one; None if some rank has staged none."""
        by_step = self.places.map_staged_steps_to_ranks(epoch)
        everybody = functools.reduce(operator.or_, by_step.values(), 0)
        if not self.world or everybody.bit_count() < self.world:
            return None
        found = 0
        for step in sorted(by_step, reverse=True):
            found |= by_step[step]
            if found == everybody:
                return step
        return None

    # --- asking --------------------------------------------------------------------------

    def get_last_sequence(self, node_rank: int, pod: str) -> int:
        """The sequence of this pod's last report, if all that it reported since its start is known.
        0: its next report must be whole."""
        place = self.places.get(node_rank)
        if place is None or place.pod != pod or place.gone or node_rank in self._asked:
            return 0
        return place.sidecar.sequence

    @property
    def world(self) -> int | None:
        """The number of ranks: as running trainers report it, otherwise as the trainers that are
        gone did. None: unknown."""
        return self._config.world

    @property
    def settled(self) -> bool:
        """Whether all ranks have been reported, and all reporting pods that exist have scanned
        their volumes."""
        there = self.places
        return (
            self.world is not None
            and there.are_reports_complete
            and there.own.once.bit_count() >= self.world
        )

    def find_newest_committed(self) -> StepId | None:
        """The newest step that is durable on every rank, as far as reports show now."""
        return self.core.watermark(Tier.LOCAL)

    def commits(self) -> tuple[StepId, ...]:
        """All steps that are durable on every rank, oldest first."""
        return self.core.committed(Tier.LOCAL)

    def find_newest_restorable_step(self) -> StepId | None:
        """The newest step that all ranks could restore now, each from any tier."""
        return self.core.watermark(Tier.MEMORY)

    def watermarks(self) -> dict[Tier, StepId]:
        """The newest step that every rank holds, by tier: in memory or on any other tier; on each
        of the others, there or on a stronger one."""
        shared = (tier for tier in Tier if tier.shared)  # it is there, whatever the policy says now
        marks = {tier: self.core.watermark(tier) for tier in (*self._config.tiers, *shared)}
        return {tier: step_id for tier, step_id in marks.items() if step_id is not None}

    def archived(self) -> tuple[StepId, ...]:
        """Steps of which the archive has all shards, oldest first."""
        return self.core.committed(Tier.ARCHIVE)

    def newest_archived(self) -> StepId | None:
        return self.core.watermark(Tier.ARCHIVE)

    def find_restart_step(self) -> StepId | None:
        """The step that a restart would restore; None if that is uncertain, or if there is none."""
        plan = None if self.world is None else self.core.find_restore_step(range(self.world))
        return plan if isinstance(plan, StepId) else None

    def node_loss_outcome(self) -> NodeLossOutcome:
        """What the loss of one node would leave."""
        if self._safety is None or self._safety[0] != self._changes:
            self._safety = self._changes, self._judge()
        return self._safety[1]

    def _judge(self) -> NodeLossOutcome:
        archived = self.newest_archived()
        judged = [*self._judged(self._drives())]
        left = least_restart_step(judged)
        pods = {rank: place.pod for rank, place in self.places.items() if not place.gone}
        pod = least_restart_step(self._judged(pods))
        return NodeLossOutcome(
            step=archived if left is None else left,
            pod=archived if pod is None else pod,
            archived=archived,
            sole=(judged[0][1] if judged else None) or frozenset(),
        )

    def _judged(self, names: Mapping[int, str]) -> Iterator[tuple[StepId, Sole, Sole]]:
        """The commits that are newer than the archive's, newest first, with `_sole`; down to the
        first that no loss harms, since the older ones decide nothing."""
        archived = self.newest_archived()
        for step_id in reversed(self.commits()):
            if archived is not None and step_id <= archived:
                return
            with_twins, own = self._sole(step_id, names)
            yield step_id, with_twins, own
            if own == frozenset():
                return

    def newest_without_agents(self, *, twins: bool) -> StepId | None:
        """The newest step that is complete on drives, or archived, without the shards that agents
        serve. `twins`: whether it may be so by images of twins; what an agent serves is exact."""
        drives, lenders = self._drives(), None if twins else ()
        whole = (
            step_id
            for step_id in reversed(self.core.held_steps)
            if self.core.lineage.is_restorable(step_id)
            and self._sole(step_id, drives, lenders)[0] is not None
        )
        newest = next(whole, None), self.newest_archived()
        return max((step_id for step_id in newest if step_id is not None), default=None)

    def _drives(self) -> dict[int, str]:
        """By node rank, the node of all drives that still exist, also of pods that are gone."""
        return {rank: place.node for rank, place in self.places.items() if not place.dropped}

    def _sole(
        self, step_id: StepId, names: Mapping[int, str], lenders: Collection[int] | None = None
    ) -> tuple[Sole, Sole]:
        """`node_loss.sole_nodes` over what the node ranks are called that have a copy: where twins
        count, because ranks lend each other images, and where they do not. `lenders`: the node
        ranks whose twins count; None: all."""
        lent: dict[str, int] = {}
        own: dict[str, int] = {}
        world = 0
        for held in self._on_drives(step_id):
            node_rank, _, saved = held.place
            if (name := names.get(node_rank)) is not None:
                world = world or saved
                own[name] = own.get(name, 0) | held.ranks
                if held.has_twins and (lenders is None or node_rank in lenders):
                    lent[name] = lent.get(name, 0) | held.ranks_with_twins()
        if not world:
            return None, None
        sole = sole_nodes(own, world=world)
        if not lent:
            return sole, sole
        by_twins = {name: ranks | lent.get(name, 0) for name, ranks in own.items()}
        return sole_nodes(by_twins, world=world), sole

    def _on_drives(self, step_id: StepId) -> Iterator[StepImagesAtPlace]:
        """Each copy of the step on a drive."""
        return (
            held for held in self.core.copies(step_id) if held.place[1] in (Tier.LOCAL, Tier.PEER)
        )

    def expendable(self) -> tuple[StepId, ...]:
        """Steps of which no copy on local is needed, oldest first.

        For each node, the newest step that survives its loss is still needed. If a link is slower
        than the steps, this one is older than the steps that retention keeps.
        """
        gone = self.core.expendable(Tier.LOCAL, self._keep)
        kept = (
            find_steps_surviving_loss(
                {step_id: of for step_id, of, _ in self._judged(self._drives())}
            )
            if gone
            else ()
        )
        return tuple(step_id for step_id in gone if step_id not in kept)

    def list_steps_on_node_volumes(self, node_rank: int) -> set[StepId]:
        """Steps of which this node rank has a shard on its volumes."""
        place = self.places.get(node_rank)
        if place is None or place.gone:
            return set()
        return {step_id for step_id, _ in self.core.copies_of_node(node_rank, Tier.LOCAL)}

    def list_node_complete_steps(self, node_rank: int, tier: Tier) -> Iterator[StepId]:
        """Steps that all ranks of this place's own hold on this tier."""
        own = self.places[node_rank].own_ranks
        return (
            step_id
            for step_id, held in self.core.copies_of_node(node_rank, tier)
            if own and not own & ~held.ranks
        )

    def newest_of_slowest_rank(self, node_rank: int) -> int:
        """The newest step on local of the rank of this place that is the farthest behind; -1 if a
        rank has none."""
        left = self.places[node_rank].ranks.all
        newest_first = sorted(
            self.core.copies_of_node(node_rank, Tier.LOCAL), key=_step_of, reverse=True
        )
        for step_id, held in newest_first:
            left &= ~held.ranks
            if not left:
                return step_id.step
        return -1

    def count_live_ranks(self) -> int:
        """How many ranks have a trainer."""
        return self.places.alive.once.bit_count()

    def find_steps_on_drives(self, node_rank: int) -> Iterator[StepId]:
        """Steps of which this place's drives hold any image, its own or a copy."""
        for tier in (Tier.LOCAL, Tier.PEER):
            yield from (step_id for step_id, _ in self.core.copies_of_node(node_rank, tier))


def _step_of(pair: tuple[StepId, object]) -> StepId:
    return pair[0]
