"""Decides what a run has kept, from reports alone: reports in, watermarks and actions out.

Like etcd's raft, the ledger does no I/O and has no clock. The host has both; its duties are
numbered in docs/protocol.md. All state can be rebuilt from new reports. So a ledger that is
restarted, or moved from one leader to the next, gives the same answers.

Reports are level-triggered: a report says all that *is* there now, and replaces what the same node
reported before of the same rank and tier. So a report may be lost, repeated, or merged with the
next one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.commit_rule import (
    ALL_RANKS,
    NO_NODE,
    RESTORABLE,
    BoxSources,
    EpochLineage,
    RanksReport,
    ReportedCopies,
    StepLiveness,
    each_rank,
    rank_bitmap,
    tiers_at_least,
    trace_lineage,
)
from keepstep.core.restore_vote import are_first_epoch_steps
from keepstep.core.retention import Retention, steps_to_retire, unneeded_steps
from keepstep.errors import few
from keepstep.steps import IN_POD, NEAREST_FIRST, Epoch, EpochId, StepId, StrEnum, Tier, TierAnswer


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """What a ledger must know of its run.

    `tiers`: the tiers of the run. Each must answer before the run may begin at step 0. `world`: how
    many ranks run now, None while unknown. `stale_after`: after so many committed steps in a row
    with unchanged parameters on every rank, an alarm is raised (gradient accumulation leaves the
    parameters of some steps unchanged).
    """

    tiers: tuple[Tier, ...] = IN_POD
    world: int | None = None
    stale_after: int = 6


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A node rank says what it has of some ranks, and every epoch that it ever saw.

    `sequence`: grows with every report of this node rank. A report with a lower number than the
    last one is ignored. Always 0: reports arrive in order.
    """

    node_rank: int = 0
    ranks: tuple[RanksReport, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    sequence: int = 0


@dataclass(frozen=True)
class EpochStarted:
    """All ranks agreed on this epoch in the collective of a restore."""

    epoch: Epoch


@dataclass(frozen=True)
class FreshStartAcknowledged:
    """It was acknowledged that this epoch began at step 0 although older steps exist. The older
    steps may then be deleted.

    `epoch` None: the newest epoch that began at step 0 beside older steps.
    """

    epoch: EpochId | None = None


@dataclass(frozen=True)
class ReportedHoldingsLost:
    """What this node reported of this rank (None: of all) is out of reach, until it reports
    again."""

    node_rank: int
    rank: int | None = None


Event = Reported | EpochStarted | FreshStartAcknowledged | ReportedHoldingsLost


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCommittedOnTier:
    """Every rank holds this step on this tier or a stronger one. Said once per tier and step, and
    again if the step was lost and came back."""

    tier: Tier
    id: StepId


class AlarmKind(StrEnum):
    """What a person should look at."""

    STALE_SNAPSHOT = "stale-snapshot"
    WORLD_CHANGED = "world-changed"
    TWO_WRITERS = "two-writers"
    EPOCH_CONFLICT = "epoch-conflict"
    FRESH_START = "fresh-start"


@dataclass(frozen=True)
class Alarm:
    """A condition that a person should look at. Said once when it arises, and again only if it
    went away in between."""

    kind: AlarmKind
    text: str


Action = StepCommittedOnTier | Alarm


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RestorePlan:
    """Restore this step.

    `tiers`: for each rank that saved the step, the nearest tier that holds its image. If another
    number of ranks runs now, these divide its boxes among themselves. `by_twins`: ranks whose own
    image is gone. Their boxes are restored from a twin's image, which is on the tier named in
    `tiers`.
    """

    id: StepId
    tiers: Mapping[int, Tier]
    by_twins: tuple[int, ...] = ()


@dataclass(frozen=True)
class NothingToRestore:
    """Every rank and every tier said that there is nothing: begin at step 0."""


@dataclass(frozen=True)
class UndecidedRestore:
    """There is no plan yet, or none is possible; `reason` says which. This is never a reason to
    begin at step 0.

    `waits_for`: the (rank, tier) pairs whose answers are missing. Empty: waiting alone will not
    help.
    """

    reason: str
    waits_for: tuple[tuple[int, Tier], ...] = ()


def epoch_conflicts(
    parents: Mapping[EpochId, Collection[StepId | None]], epochs: Collection[EpochId]
) -> Iterator[Alarm]:
    """Two lives of the run at once: an epoch with two parents, or two epochs with one number."""
    for epoch_id, named in parents.items():
        if len(named) > 1:
            names = " and ".join(sorted(str(parent) for parent in named))
            yield Alarm(AlarmKind.EPOCH_CONFLICT, f"epoch {epoch_id} has two parents: {names}")
    by_number: dict[int, list[EpochId]] = {}
    for epoch_id in epochs:
        by_number.setdefault(epoch_id.number, []).append(epoch_id)
    for ids in by_number.values():
        if len(ids) > 1:
            text = f"epochs {' and '.join(map(str, sorted(ids)))} began side by side"
            yield Alarm(AlarmKind.EPOCH_CONFLICT, text)


def two_writer_alarms(copies: ReportedCopies) -> Iterator[Alarm]:
    """One rank was written twice: different images of one step, or memory on two nodes."""
    for step_id in copies.steps_with_conflicting_images:
        ranks = _named(copies.find_conflicting_ranks(step_id))
        text = f"two different images of step {step_id}, rank {ranks}"
        yield Alarm(AlarmKind.TWO_WRITERS, text)
    for rank, nodes in sorted(copies.find_ranks_on_several_nodes().items()):
        text = f"rank {rank} is in the memory of node ranks {_named(nodes)}"
        yield Alarm(AlarmKind.TWO_WRITERS, text)


class RecentParameterDigests:
    """The digests of the parameters in the newest `kept` commits. They are remembered here because
    shards are retired."""

    def __init__(self, *, kept: int) -> None:
        self._kept = kept
        self._of_step: dict[StepId, array[int]] = {}

    def add(self, ids: Sequence[StepId], copies: ReportedCopies) -> None:
        """Take in steps that were committed on a durable tier, oldest first."""
        for step_id in ids[-self._kept :]:
            (world,) = copies.worlds(step_id)
            digests = array("i", [0]) * world
            for held in copies.copies(step_id):
                for rank, digest in held.iterate_parameter_digests():
                    if digest and rank < world:
                        digests[rank] = digest
            self._of_step[step_id] = digests
        for old in sorted(self._of_step)[: -self._kept]:
            del self._of_step[old]

    def check_unchanged_parameters(self) -> Iterator[Alarm]:
        """The steps advance within one epoch, but no rank's parameters change."""
        ids = sorted(self._of_step)
        if len(ids) < self._kept or ids[0].epoch != ids[-1].epoch:
            return
        first, *others = (self._of_step[step_id] for step_id in ids)
        if 0 not in first and all(other == first for other in others):
            # The text names no step, so that a standing alarm is said once, not with each commit.
            yield Alarm(
                AlarmKind.STALE_SNAPSHOT,
                f"the parameters of all ranks were the same in the last {len(ids)} commits of "
                f"epoch {ids[0].epoch}: does the training change the model that is saved?",
            )


_Retired = tuple[list[StepId], tuple[StepId, ...]]
_STEPS_NAMED = 3
_NAMED = 8


def is_in_sorted(step_id: StepId, ids: Sequence[StepId]) -> bool:
    """Whether `step_id` is in `ids`, which must be sorted."""
    at = bisect_left(ids, step_id)
    return at < len(ids) and ids[at] == step_id


class Ledger(ReportedCopies):
    """The ledger of one run. `apply` events; obey the actions; ask `plan`, `committed`,
    `watermark`."""

    def __init__(self, config: LedgerConfig | None = None) -> None:
        super().__init__()
        self.config = config or LedgerConfig()
        self._recorded: dict[EpochId, Epoch] = {}
        self._epochs: tuple[Epoch, ...] | None = None
        self._acknowledged: set[EpochId] = set()
        self._parents: dict[EpochId, set[StepId | None]] = {}
        self._sequences: dict[int, int] = {}
        self._announced: dict[Tier, tuple[StepId, ...]] = {}
        self._alarmed: set[Alarm] = set()
        self._signatures = RecentParameterDigests(kept=self.config.stale_after)
        self._lineage = EpochLineage()
        self._traced: frozenset[EpochId] | None = None
        """The epochs of images for which the lineage was computed; None: compute it again."""
        self._conflicts: tuple[Alarm, ...] = ()
        self._committed: dict[Tier, tuple[StepId, ...]] = {}
        self._among: dict[Tier, set[StepId]] = {}
        self._known_retired: dict[Tier, tuple[object, _Retired]] = {}

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Take in one event, and say what follows."""
        self.apply_event(event)
        return self.actions()

    def apply_event(self, event: Event) -> None:
        """Take in one event. Taking the same event again changes nothing."""
        if isinstance(event, Reported):
            self._report(event)
        elif isinstance(event, EpochStarted):
            self._record(event.epoch)
        elif isinstance(event, FreshStartAcknowledged):
            self._acknowledge(event.epoch)
        else:
            self.forget_reports(node_rank=event.node_rank, rank=event.rank)
            if event.rank is None:
                self._sequences.pop(event.node_rank, None)

    def actions(self) -> tuple[Action, ...]:
        """What follows from the events since the last call: of many events it costs as much as of
        one."""
        return (*self._commits(), *self._alarms())

    def keep_epochs(self, epochs: Iterable[Epoch]) -> None:
        """Forget all recorded epochs except these. No record of the others exists any more, and
        they must not outrank an epoch that begins at step 0."""
        self._recorded, self._parents, self._epochs, self._traced = {}, {}, None, None
        for epoch in epochs:
            self._record(epoch)

    def trim_archived_steps(self, most: int) -> None:
        """When more than `most` steps are archived, remember only the newest `most // 2`."""
        archived = self._held.get((NO_NODE, Tier.ARCHIVE), {})
        if len(archived) > most:
            for key in sorted(archived)[: -(most // 2)]:
                self._take_out(archived[key], ALL_RANKS)

    def _catch_up(self) -> None:
        """Recompute what depends on the changes since the last time, without a look at steps that
        did not change."""
        if not self.changed and self._traced is not None:
            return
        changed, self.changed = self.changed, set()
        if self._traced is None or self._traced != self._epochs_held.keys():
            self._traced, before = frozenset(self._epochs_held.keys()), self._lineage
            self._lineage = trace_lineage(
                self._recorded, seen=self._traced, acknowledged=self._acknowledged
            )
            there = {*self._recorded, *self._traced}
            self._conflicts = tuple(epoch_conflicts(self._parents, there))
            if self._lineage != before:
                self._committed.clear()
        for tier in self._committed:
            among = self._among[tier]
            moved = {
                step_id
                for step_id in changed
                if self._is_committed(step_id, tier) != (step_id in among)
            }
            if moved:
                among ^= moved
                self._committed[tier] = tuple(sorted(among))

    def _is_committed(self, step_id: StepId, tier: Tier) -> bool:
        return self.complete(step_id, tier) and self._lineage.is_restorable(step_id)

    # --- asking --------------------------------------------------------------------------

    @property
    def lineage(self) -> EpochLineage:
        self._catch_up()
        return self._lineage

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch on record, oldest first."""
        if self._epochs is None:
            self._epochs = tuple(self._recorded[epoch_id] for epoch_id in sorted(self._recorded))
        return self._epochs

    def find_parent_step(self, epoch: EpochId) -> StepId | None:
        """The step that this epoch went on from; None for none, or if the epoch is not recorded."""
        recorded = self._recorded.get(epoch)
        return recorded.parent if recorded is not None else None

    def highest_epoch(self) -> int:
        """The highest epoch number ever seen, 0 for none. The next epoch's is one more."""
        return max(
            (epoch_id.number for epoch_id in {*self._recorded, *self._epochs_held.keys()}),
            default=0,
        )

    def is_dead(self, step_id: StepId) -> bool:
        """Whether a later epoch went on from before this step."""
        return self.lineage.step_liveness(step_id) is StepLiveness.DEAD

    def committed(self, tier: Tier) -> tuple[StepId, ...]:
        """Restorable steps that every rank holds on this tier or a stronger one, oldest first.

        For `Tier.MEMORY`: the steps that all ranks could restore, each from any tier.
        """
        self._catch_up()
        if tier not in self._committed:
            committed = (
                step_id for step_id in self.held_steps if self._is_committed(step_id, tier)
            )
            self._committed[tier] = tuple(committed)
            self._among[tier] = {*self._committed[tier]}
        return self._committed[tier]

    def watermark(self, tier: Tier) -> StepId | None:
        """The newest committed step of this tier."""
        return next(reversed(self.committed(tier)), None)

    def list_reachable_steps(self) -> tuple[StepId, ...]:
        """Restorable steps of which every box can be reached somewhere, oldest first. Where there
        is none, the lost ones of which it can: the run does not begin again beside a whole step.

        These are more steps than the committed ones: a step may be whole by twins alone, after its
        other replica was lost with a node. Such a step is never a commit, and never causes a
        deletion.

        A twin has the boxes of a rank, but not its buffers, RNG and extras. So a step in which
        twins stand in for ranks is left out if these ranks have their own images of the newest
        complete step before it nearby, and so are the steps between the two. After a crash, or
        after the loss of a node with a buddy, the run then goes on from that complete step:
        exactly, and at most a few steps back.
        """
        return tuple(reversed(list(self._whole())))

    def restart_step(self, *, world: int | None = None) -> StepId | None:
        """The newest step that `world` ranks could go on from now; None if no step is whole."""
        return next(self._whole(world=world), None)

    def _whole(self, *, world: int | None = None) -> Iterator[StepId]:
        """The steps of `whole`, newest first. If another number of ranks runs than saved the step,
        all of them put it together, so no twin stands in for a rank."""
        for standings in (RESTORABLE, (StepLiveness.LOST,)):
            found = False
            for step_id in self._whole_of(standings, world):
                found = True
                yield step_id
            if found:
                return

    def _whole_of(self, standings: Collection[StepLiveness], world: int | None) -> Iterator[StepId]:
        lineage = self.lineage
        steps = [
            step_id for step_id in self.held_steps if lineage.step_liveness(step_id) in standings
        ]
        preferred: StepId | None = None
        for place, step_id in reversed(list(enumerate(steps))):
            if preferred is not None and step_id > preferred:
                continue  # no step between it and the one that it is preferred to comes first
            if self.complete(step_id, Tier.MEMORY):
                yield step_id
                continue
            coverage = self.find_reachable_boxes(step_id)
            if coverage is not None and coverage.covers_all_boxes:
                older = reversed(steps[:place])
                complete = next(
                    (step_id for step_id in older if self._ends_search(step_id, coverage)),
                    None,
                )
                if (
                    complete is None
                    or coverage.world != (world or coverage.world)
                    or not _nearby(coverage, self.find_reachable_boxes(complete))
                ):
                    yield step_id
                else:
                    preferred = complete

    def _ends_search(self, step_id: StepId, newer: BoxSources) -> bool:
        """Whether no older step than this one is nearby: it is complete, or the run was of another
        world then."""
        if self.complete(step_id, Tier.MEMORY):
            return True
        coverage = self.find_reachable_boxes(step_id)
        return coverage is not None and coverage.covers_all_boxes and coverage.world != newer.world

    def have_all_tiers_reported(self, rank: int) -> bool:
        """Whether it is known of every tier what it holds of this rank."""
        return all(
            self.combine_answers(rank, tier) is not TierAnswer.UNKNOWN for tier in self.config.tiers
        )

    def archived_of(self, rank: int) -> list[StepId]:
        """Steps for which the archive holds this rank's image."""
        there = self.copies_of_node(NO_NODE, Tier.ARCHIVE)
        return [step_id for step_id, held in there if held.ranks >> rank & 1]

    def size_bytes(self, step_id: StepId) -> int:
        """Bytes of the step: the sum of one image of each rank, the largest where sizes differ.
        0 if the size is unknown for any rank."""
        largest: dict[int, int] = {}
        for held in self.copies(step_id):
            for rank, size in held.sizes():
                largest[rank] = max(size, largest.get(rank, 0))
        world = max(self.worlds(step_id), default=0)
        known = len(largest) >= world and all(largest.values())
        return sum(largest.values()) if known else 0

    def written_at(self, ids: Iterable[StepId]) -> dict[StepId, float]:
        """When the last image of each step was written, in unix seconds. Steps without any time are
        left out."""
        times = {
            step_id: max((copy.written_at for copy in self.copies(step_id)), default=0.0)
            for step_id in ids
        }
        return {step_id: at for step_id, at in times.items() if at}

    def expendable(self, tier: Tier, policy: Retention) -> tuple[StepId, ...]:
        """Steps of which no copy on this tier is needed under this policy, oldest first.

        The deletion rule: a step is named only when a newer live step is complete on an equal or
        stronger tier. A step that is aside or lost is never named, because it may still be needed.
        """
        alive, gone = self._retired(tier, policy)
        if not alive:
            return ()
        by_standing: dict[StepLiveness, list[StepId]] = {standing: [] for standing in StepLiveness}
        for step_id in {*self.held_steps}.difference(self.committed(tier)):
            by_standing[self.lineage.step_liveness(step_id)].append(step_id)
        others = unneeded_steps(
            alive,
            policy,
            dead=by_standing[StepLiveness.DEAD],
            unfinished=by_standing[StepLiveness.LIVE],
        )
        return tuple(sorted((*gone, *others))) if others else gone

    def _retired(self, tier: Tier, policy: Retention) -> _Retired:
        """The live commits, and those of them that the policy does not keep. An archive may have
        thousands, so this is computed again only when commits, lineage or policy changed."""
        of = self.committed(tier), self.lineage, policy
        known = self._known_retired.get(tier)
        # times may be reported after images
        if known is None or known[0] != of or policy.every_s is not None:
            alive = [
                step_id
                for step_id in of[0]
                if self._lineage.step_liveness(step_id) is StepLiveness.LIVE
            ]
            times = None if policy.every_s is None else self.written_at(alive)
            found = alive, steps_to_retire(alive, policy, written_at=times) if alive else ()
            known = self._known_retired[tier] = of, found
        return known[1]

    def plan(self, ranks: Collection[int]) -> RestorePlan | NothingToRestore | UndecidedRestore:
        """What `ranks` (all ranks of the run) should restore. A hint: their vote decides."""
        found = self.find_restore_step(ranks)
        if not isinstance(found, StepId):
            return found
        coverage = self.find_reachable_boxes(found)
        assert coverage is not None, "a step that is whole is covered"
        return RestorePlan(
            found, coverage.nearest_tier_by_rank, tuple(coverage.ranks_covered_by_twins)
        )

    def find_restore_step(
        self, ranks: Collection[int]
    ) -> StepId | NothingToRestore | UndecidedRestore:
        """Only the step of `plan`. This is cheaper, because it does not look at every rank."""
        newest = self.restart_step(world=len(ranks))
        coverage = None if newest is None else self.find_reachable_boxes(newest)
        if newest is None or coverage is None:
            return self._nothing(ranks)
        if waits_for := self._silent_before(coverage, frozenset(ranks)):
            return UndecidedRestore(f"no answer yet from {_places(waits_for)}", waits_for)
        return newest

    def _silent_before(
        self, chosen: BoxSources, ranks: Collection[int]
    ) -> tuple[tuple[int, Tier], ...]:
        """(rank, tier) pairs that have not answered and may hold a newer step.

        For a rank with its own image: the tiers nearer than the one chosen for it. For a rank for
        which a twin stands in: all tiers.
        """
        chosen_ranks = rank_bitmap(ranks) if len(ranks) < chosen.world else -1
        silent = {
            tier: self.compute_unknown_ranks_mask(tier) & chosen_ranks for tier in self.config.tiers
        }
        if not any(
            unknown & (chosen.find_ranks_on_tiers(tiers_at_least(tier)[1:]) | chosen.twins)
            for tier, unknown in silent.items()
        ):
            return ()
        return tuple(
            (rank, tier)
            for rank, used in chosen.nearest_tier_by_rank.items()
            for tier in self.config.tiers
            if rank in ranks
            and (chosen.twins >> rank & 1 or NEAREST_FIRST.index(tier) < NEAREST_FIRST.index(used))
            and self.combine_answers(rank, tier) is TierAnswer.UNKNOWN
            and not self.are_reporters_gone(rank, tier)
        )

    def _nothing(self, ranks: Collection[int]) -> NothingToRestore | UndecidedRestore:
        """`NothingToRestore` (begin at step 0) needs NONE from every rank and every tier, and no
        image held anywhere. Otherwise `UndecidedRestore`, with the reason."""
        answers = {
            (rank, tier): self.combine_answers(rank, tier)
            for rank in sorted(ranks)
            for tier in self.config.tiers
        }
        silent = tuple(place for place, answer in answers.items() if answer is TierAnswer.UNKNOWN)
        if silent:
            reason = f"no answer yet from {_places(silent)}"
            if self.held_steps and all(self.are_reporters_gone(*place) for place in silent):
                reason = (
                    f"what {_places(silent)} had is out of reach, and without it no step is whole:"
                    f" {self._incomplete()}"
                )
            return UndecidedRestore(reason, silent)
        if self.held_steps:
            return UndecidedRestore(f"steps were found, but none is complete: {self._incomplete()}")
        if found := tuple(
            place for place, answer in answers.items() if answer is not TierAnswer.NONE
        ):
            return UndecidedRestore(
                f"there is something that cannot be restored on {_places(found)}"
            )
        return NothingToRestore()

    def _incomplete(self) -> str:
        named = reversed(self.held_steps[-_STEPS_NAMED:])
        return "; ".join(f"{step_id} ({self.why_unusable(step_id)})" for step_id in named)

    def why_unusable(self, step_id: StepId) -> str:
        """Why this step, of which at least one image is held, cannot be restored."""
        standing = self.lineage.step_liveness(step_id)
        if standing is StepLiveness.DEAD:
            return "dead: a later epoch went on from before it"
        if standing is StepLiveness.LOST:
            return "its successors are not known"
        if contested := self.find_conflicting_ranks(step_id):
            return f"two different images of rank {_named(contested)}"
        if len(worlds := self.worlds(step_id)) != 1:
            return f"saved by worlds of {_named(worlds)}"
        coverage = self.find_reachable_boxes(step_id)
        return f"no copy of rank {_named(coverage.lost_ranks if coverage else ())}"

    # --- events --------------------------------------------------------------------------

    def _report(self, event: Reported) -> None:
        if event.sequence < self._sequences.get(event.node_rank, 0):
            return
        self._sequences[event.node_rank] = event.sequence
        for epoch in event.epochs:
            self._record(epoch)
        self.replace(event.node_rank, event.ranks)

    def _record(self, epoch: Epoch) -> None:
        known = self._recorded.get(epoch.id)
        if known == epoch and epoch.parent in self._parents[epoch.id]:
            return
        self._epochs = self._traced = None
        parents = self._parents.setdefault(epoch.id, set())
        parents.add(epoch.parent)
        # Of two parents (an alarm) the later one counts: it condemns fewer steps as dead.
        named = [parent for parent in parents if parent is not None]
        # A control page names no origin, so an origin that was recorded once stays.
        origin = epoch.origin or (known.origin if known is not None else "")
        self._recorded[epoch.id] = Epoch(epoch.id, max(named, default=None), origin)

    def _acknowledge(self, epoch: EpochId | None) -> None:
        if (chosen := epoch or self.lineage.fresh) is not None:
            self._acknowledged.add(chosen)
            self._traced = None

    # --- actions -------------------------------------------------------------------------

    def _commits(self) -> Iterator[StepCommittedOnTier]:
        """Announces each commit once. It remembers only the commits that still stand, so a step
        that was lost and comes back is announced again."""
        for tier in (each for each in NEAREST_FIRST if each in self.config.tiers):
            now, before = self.committed(tier), self._announced.get(tier, ())
            if tier is Tier.MEMORY or now is before:
                continue
            self._announced[tier] = now
            news = sorted({*now} - {*before})
            self._signatures.add(news, self)
            yield from (StepCommittedOnTier(tier, step_id) for step_id in news)

    def _alarms(self) -> Iterator[Alarm]:
        self._catch_up()
        now = {
            *self._conflicts,
            *two_writer_alarms(self),
            *self._signatures.check_unchanged_parameters(),
        }
        newest, world = self.watermark(Tier.MEMORY), self.config.world
        # a step of an older epoch may have any world: the ranks that run have gone on from it
        if newest is not None and newest.epoch == self._lineage.current_epoch and world is not None:
            for saved in self.worlds(newest) - {world}:
                text = f"step {newest} was saved by {saved} ranks, but {world} are running"
                now.add(Alarm(AlarmKind.WORLD_CHANGED, text))
        if self._lineage.fresh is not None:
            text = (
                f"epoch {self._lineage.fresh} began at step 0 although older steps exist; they are"
                " kept until a person deletes them or, on Kubernetes, acknowledges the fresh start"
            )
            now.add(Alarm(AlarmKind.FRESH_START, text))
        fresh, self._alarmed = now - self._alarmed, now
        yield from sorted(fresh, key=lambda alarm: (alarm.kind, alarm.text))


def _nearby(of: BoxSources, complete: BoxSources | None) -> bool:
    """Whether the ranks that have only a twin's image in `of` have their own images of the complete
    step nearby (not only in the archive), and both steps have the same world size."""
    near = tuple(tier for tier in Tier if not tier.shared)
    return (
        complete is not None
        and complete.world == of.world
        and not of.twins & ~complete.find_ranks_on_tiers(near)
    )


def _named(numbers: Collection[int]) -> str:
    return few([str(number) for number in sorted(numbers)], _NAMED)


def _places(places: Collection[tuple[int, Tier]]) -> str:
    return few([f"rank {rank} {tier}" for rank, tier in places], _NAMED)


# --- what a restart would do ---------------------------------------------------------------------
#
# The ranks decide by their own vote (`keepstep.core.restore_vote`). This is the same decision over
# what their sidecars reported, for whoever tells people about a run before it restarts: the tests
# compare both.


class RestartAction(StrEnum):
    """What a restart does: go on from a step, begin because nothing was kept, begin again because
    what was kept is gone for good, or wait for what may come back."""

    GOES_ON = "goes-on"
    BEGINS = "begins"
    BEGINS_AGAIN = "begins-again"
    WAITS = "waits"


@dataclass(frozen=True)
class RestartOutlook:
    """`step`: the step that the restart goes on from; for `BEGINS_AGAIN` and `WAITS`, the newest
    step of which anything is left."""

    restart: RestartAction
    step: StepId | None = None


def restart_outlook(ledger: Ledger, *, world: int, fleeting: bool) -> RestartOutlook:
    """What a restart of `world` ranks would do now.

    `fleeting`: what is out of reach went with its pod or its drive, and the run may begin again.
    """
    if (step := ledger.restart_step(world=world or None)) is not None:
        return RestartOutlook(RestartAction.GOES_ON, step)
    left = [
        (step_id, held)
        for step_id in ledger.held_steps
        if not ledger.is_dead(step_id)
        for held in ledger.copies(step_id)
    ]
    if not left:
        return RestartOutlook(RestartAction.BEGINS)
    newest = max(step_id for step_id, _ in left)
    if fleeting:
        return RestartOutlook(RestartAction.BEGINS_AGAIN, newest)
    by_rank: dict[tuple[int, EpochId], set[int]] = {}
    for step_id, held in left:
        for rank in each_rank(held.ranks):
            by_rank.setdefault((rank, step_id.epoch), set()).add(step_id.step)
    same_world = all(held.place[2] == world for _, held in left)
    early = same_world and all(map(are_first_epoch_steps, by_rank.values()))
    return RestartOutlook(RestartAction.BEGINS if early else RestartAction.WAITS, newest)
