"""The state machine that knows what a run has kept: reports in, watermarks and actions out.

Like etcd's raft, it does no I/O and has no clock. The host has both; its duties are numbered in
docs/ledger.md. All state can be rebuilt from new reports. So a ledger that is restarted, or moved
from a sidecar to the operator, gives the same answers.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence

from keepstep.core.holding import Holding, bitmap, bits
from keepstep.core.ledger import commit_rule
from keepstep.core.ledger.alarms import (
    Signatures,
    epoch_conflicts,
    few,
    fresh_start,
    two_writers,
    world_changed,
)
from keepstep.core.ledger.commit_rule import NO_NODE, Completeness, Coverage
from keepstep.core.ledger.events import (
    Action,
    Alarm,
    Committed,
    EpochStarted,
    Event,
    FreshStartAcknowledged,
    LedgerConfig,
    Nothing,
    RankGone,
    Reported,
    RestorePlan,
    Retire,
    Unknown,
)
from keepstep.core.lineage import Lineage, Standing, trace
from keepstep.core.retention import Retention, left_behind, retired
from keepstep.steps import NEAREST_FIRST, Answer, Epoch, EpochId, StepId, Tier

_Kept = tuple[tuple[tuple[StepId, ...], Lineage, Retention], list[StepId], tuple[StepId, ...]]
_STEPS_NAMED = 3
_RANKS_NAMED = 8


def is_among(id: StepId, ids: Sequence[StepId]) -> bool:
    """Whether `id` is in `ids`, which must be sorted."""
    at = bisect_left(ids, id)
    return at < len(ids) and ids[at] == id


class Ledger:
    """The ledger of one run. `apply` events; obey the actions; ask `plan`, `committed`,
    `watermark`."""

    def __init__(self, config: LedgerConfig | None = None) -> None:
        self.config = config or LedgerConfig()
        self._copies = Completeness()
        self._recorded: dict[EpochId, Epoch] = {}
        self._epochs: tuple[Epoch, ...] | None = None
        self._acknowledged: set[EpochId] = set()
        self._parents: dict[EpochId, set[StepId | None]] = {}
        self._sequences: dict[int, int] = {}
        self._announced: dict[Tier, tuple[StepId, ...]] = {}
        self._alarmed: set[Alarm] = set()
        self._signatures = Signatures(kept=self.config.stale_after)
        self._lineage = Lineage()
        self._traced: frozenset[EpochId] | None = None
        """The epochs of images for which the lineage was computed; None: compute it again."""
        self._conflicts: tuple[Alarm, ...] = ()
        self._committed: dict[Tier, tuple[StepId, ...]] = {}
        self._unfinished: dict[Tier, set[StepId]] = {}
        """By tier, the steps that somebody holds and that are not committed on that tier."""
        self._kept: dict[Tier, _Kept] = {}

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Take in one event. Applying the same event again changes nothing."""
        if isinstance(event, Reported):
            self._report(event)
        elif isinstance(event, EpochStarted):
            self._record(event.epoch)
        elif isinstance(event, FreshStartAcknowledged):
            self._acknowledge(event.epoch)
        elif isinstance(event, RankGone):
            self._copies.drop(node_rank=event.node_rank, rank=event.rank)
        else:
            self._copies.drop(node_rank=event.node_rank)
            self._sequences.pop(event.node_rank, None)
        self._look_again()
        return (*self._commits(), *self._retirements(), *self._alarms())

    def keep_epochs(self, epochs: Iterable[Epoch]) -> None:
        """Forget all recorded epochs except these. No record of the others exists any more, and
        they must not outrank an epoch that begins at step 0."""
        self._recorded, self._parents, self._epochs, self._traced = {}, {}, None, None
        for epoch in epochs:
            self._record(epoch)
        self._look_again()

    def keep_archived(self, most: int) -> None:
        """When more than `most` steps are archived, remember only the newest `most // 2`."""
        if self._copies.count(NO_NODE) > most:
            self._copies.keep_newest(NO_NODE, most // 2)
            self._look_again()

    def _look_again(self) -> None:
        """After a change, recompute what depends on it, without a look at steps that did not
        change."""
        changed, self._copies.changed = self._copies.changed, set()
        if self._traced is None or self._traced != self._copies.epochs:
            self._traced, before = frozenset(self._copies.epochs), self._lineage
            self._lineage = trace(
                self._recorded, seen=self._traced, acknowledged=self._acknowledged
            )
            there = {*self._recorded, *self._traced}
            self._conflicts = tuple(epoch_conflicts(self._parents, there))
            if self._lineage != before:
                self._committed.clear()
        for tier, ids in self._committed.items():
            others, moved = self._unfinished[tier], set[StepId]()
            for id in changed:
                now = self._is_committed(id, tier)
                if now != is_among(id, ids):
                    moved.add(id)
                waits = not now and self._copies.is_there(id)
                others.add(id) if waits else others.discard(id)
            if moved:
                self._committed[tier] = tuple(sorted(moved.symmetric_difference(ids)))
                self._unfinished[tier] = set(others)  # a copy takes no more memory than it needs

    def _is_committed(self, id: StepId, tier: Tier) -> bool:
        return self._copies.complete(id, tier) and self._lineage.restorable(id)

    # --- asking --------------------------------------------------------------------------

    @property
    def lineage(self) -> Lineage:
        return self._lineage

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch on record, oldest first."""
        if self._epochs is None:
            self._epochs = tuple(self._recorded[id] for id in sorted(self._recorded))
        return self._epochs

    def parent(self, epoch: EpochId) -> StepId | None:
        """The step that this epoch went on from; None for none, or if the epoch is not recorded."""
        recorded = self._recorded.get(epoch)
        return recorded.parent if recorded is not None else None

    @property
    def steps(self) -> Sequence[StepId]:
        """Every step of which any node or the archive holds an image, oldest first."""
        return self._copies.steps

    def steps_at(self, node_rank: int) -> int:
        """How many steps this node holds. A step counts once for each tier."""
        return self._copies.count(node_rank)

    def held(self, node_rank: int, tier: Tier) -> int:
        """Bitmap of the ranks of which this node reported any image on this tier."""
        return self._copies.held(node_rank, tier)

    def highest_epoch(self) -> int:
        """The highest epoch number ever seen, 0 for none. The next epoch's is one more."""
        return max((id.number for id in {*self._recorded, *self._copies.epochs}), default=0)

    def is_dead(self, id: StepId) -> bool:
        """Whether a later epoch went on from before this step."""
        return self._lineage.standing(id) is Standing.DEAD

    def committed(self, tier: Tier) -> tuple[StepId, ...]:
        """Restorable steps that every rank holds on this tier or a stronger one, oldest first.

        For `Tier.MEMORY`: the steps that all ranks could restore, each from any tier.
        """
        if tier not in self._committed:
            judged = [(id, self._is_committed(id, tier)) for id in self._copies.steps]
            self._committed[tier] = tuple(id for id, is_committed in judged if is_committed)
            self._unfinished[tier] = {id for id, is_committed in judged if not is_committed}
        return self._committed[tier]

    def watermark(self, tier: Tier) -> StepId | None:
        """The newest committed step of this tier."""
        return next(reversed(self.committed(tier)), None)

    def whole(self) -> tuple[StepId, ...]:
        """Restorable steps of which every box can be reached somewhere, oldest first.
        `commit_rule.whole` says when a twin's image stands in for a rank's own."""
        return commit_rule.whole(self._copies, self._lineage)

    def restart_step(self, *, world: int | None = None) -> StepId | None:
        """The newest step that `world` ranks could go on from now; None if no step is whole."""
        return commit_rule.newest_whole(self._copies, self._lineage, world=world)

    def without(self, *node_ranks: int, tier: Tier = Tier.LOCAL) -> StepId | None:
        """The newest step that could be restored from this tier and stronger ones if everything
        that these nodes reported were gone. Images in the archive would still be there."""
        return commit_rule.without(self._copies, self._lineage, node_ranks, tier)

    def holders(self, id: StepId, tier: Tier) -> int:
        """Bitmap of the ranks whose image of the step is on exactly this tier."""
        return self._copies.ranks(id, (tier,))

    def has_answered(self, rank: int) -> bool:
        """Whether it is known of every tier what it holds of this rank."""
        return all(
            self._copies.answer(rank, tier) is not Answer.UNKNOWN for tier in self.config.tiers
        )

    def interned(self, id: StepId) -> StepId:
        """An equal `StepId`: the one object that the ledger uses for this step."""
        return self._copies.interned(id)

    def copies(self, id: StepId) -> Sequence[Holding]:
        """Every copy of this step."""
        return self._copies.copies(id)

    def archived_of(self, rank: int) -> list[StepId]:
        """Steps for which the archive holds this rank's image."""
        there = self._copies.of_node(NO_NODE, Tier.ARCHIVE)
        return [id for id, held in there if held.ranks >> rank & 1]

    def of_node(self, node_rank: int, tier: Tier) -> Iterator[tuple[StepId, Holding]]:
        """The steps that this node holds on this tier, each with its copies."""
        return self._copies.of_node(node_rank, tier)

    def size_bytes(self, id: StepId) -> int:
        """Bytes of the step: the sum of one image of each rank, the largest where sizes differ.
        0 if the size is unknown for any rank."""
        largest: dict[int, int] = {}
        for held in self._copies.copies(id):
            for rank, size in held.sizes():
                largest[rank] = max(size, largest.get(rank, 0))
        world = max(self._copies.worlds(id), default=0)
        known = len(largest) >= world and all(largest.values())
        return sum(largest.values()) if known else 0

    def written_at(self, ids: Iterable[StepId]) -> dict[StepId, float]:
        """When the last image of each step was written, in unix seconds. Steps without any time are
        left out."""
        times = {
            id: max((one.written_at for one in self._copies.copies(id)), default=0.0) for id in ids
        }
        return {id: at for id, at in times.items() if at}

    def expendable(self, tier: Tier, policy: Retention) -> tuple[StepId, ...]:
        """Steps of which no copy on this tier is needed under this policy, oldest first.

        The deletion rule: a step is named only when a newer live step is complete on an equal or
        stronger tier. A step that is aside or lost is never named, because it may still be needed.
        """
        alive, gone = self._retired(tier, policy)
        by_standing: dict[Standing, list[StepId]] = {one: [] for one in Standing}
        for id in self._unfinished[tier] if alive else ():
            by_standing[self._lineage.standing(id)].append(id)
        others = left_behind(
            alive, policy, dead=by_standing[Standing.DEAD], unfinished=by_standing[Standing.LIVE]
        )
        return tuple(sorted((*gone, *others))) if others else gone

    def _retired(self, tier: Tier, policy: Retention) -> tuple[list[StepId], tuple[StepId, ...]]:
        """The live committed steps, and those of them that the policy does not keep.

        Computed again only when the committed steps, the lineage or the policy changed.
        """
        of = self.committed(tier), self._lineage, policy
        known = self._kept.get(tier)
        timed = policy.every_s is not None  # depends on times, which may be reported after images
        if timed or known is None or any(map(operator.is_not, known[0], of)):
            alive = [id for id in of[0] if self._lineage.standing(id) is Standing.LIVE]
            times = None if policy.every_s is None else self.written_at(alive)
            gone = tuple(retired(alive, policy, written_at=times)) if alive else ()
            known = self._kept[tier] = of, alive, gone
        return known[1:]

    def plan(self, ranks: Collection[int]) -> RestorePlan | Nothing | Unknown:
        """What `ranks` (all ranks of the run) should restore. A hint: their vote decides."""
        found = self.next_step(ranks)
        if not isinstance(found, StepId):
            return found
        coverage = self._copies.coverage(found)
        assert coverage is not None, "a step that is whole is covered"
        tiers, by_twins = coverage.tiers, tuple(coverage.by_twins)
        return RestorePlan(found, tiers, coverage.world, by_twins)

    def next_step(self, ranks: Collection[int]) -> StepId | Nothing | Unknown:
        """Only the step of `plan`. This is cheaper, because it does not look at every rank."""
        newest = commit_rule.newest_whole(self._copies, self._lineage, world=len(ranks))
        coverage = None if newest is None else self._copies.coverage(newest)
        if newest is None or coverage is None:
            return self._nothing(ranks)
        if waits_for := self._silent_before(coverage, frozenset(ranks)):
            return Unknown(f"no answer yet from {_places(waits_for)}", waits_for)
        return newest

    def _silent_before(
        self, chosen: Coverage, ranks: Collection[int]
    ) -> tuple[tuple[int, Tier], ...]:
        """(rank, tier) pairs that have not answered and may hold a newer step.

        For a rank with its own image: the tiers nearer than the one chosen for it. For a rank for
        which a twin stands in: all tiers.
        """
        wanted = bitmap(ranks) if len(ranks) < chosen.world else -1
        silent = {tier: self._copies.silent(tier) & wanted for tier in self.config.tiers}
        if not any(
            silent[tier] & chosen.on(_from(tier)) | silent[tier] & chosen.twins for tier in silent
        ):
            return ()
        return tuple(
            (rank, tier)
            for rank, used in chosen.tiers.items()
            for tier in self.config.tiers
            if rank in ranks
            and (chosen.twins >> rank & 1 or NEAREST_FIRST.index(tier) < NEAREST_FIRST.index(used))
            and self._copies.answer(rank, tier) is Answer.UNKNOWN
            and not self._copies.out_of_reach(rank, tier)
        )

    def _nothing(self, ranks: Collection[int]) -> Nothing | Unknown:
        """`Nothing` (begin at step 0) needs NONE from every rank and every tier, and no image held
        anywhere. Otherwise `Unknown`, with the reason."""
        answers = {
            (rank, tier): self._copies.answer(rank, tier)
            for rank in sorted(ranks)
            for tier in self.config.tiers
        }
        silent = tuple(place for place, said in answers.items() if said is Answer.UNKNOWN)
        if silent:
            return Unknown(self._why_silent(silent), silent)
        if self._copies.steps:
            return Unknown(f"steps were found, but none is complete: {self._incomplete()}")
        if found := tuple(place for place, said in answers.items() if said is not Answer.NONE):
            return Unknown(f"there is something that cannot be restored on {_places(found)}")
        return Nothing()

    def _why_silent(self, silent: Collection[tuple[int, Tier]]) -> str:
        if self._copies.steps and all(self._copies.out_of_reach(*place) for place in silent):
            return (
                f"what {_places(silent)} had is out of reach, and without it no step is whole: "
                f"{self._incomplete()}"
            )
        return f"no answer yet from {_places(silent)}"

    def _incomplete(self) -> str:
        named = reversed(self._copies.steps[-_STEPS_NAMED:])
        return "; ".join(f"{id} ({self.what_ails(id)})" for id in named)

    def what_ails(self, id: StepId) -> str:
        """Why this step, of which at least one image is held, cannot be restored."""
        standing = self._lineage.standing(id)
        if standing is Standing.DEAD:
            return "dead: a later epoch went on from before it"
        if standing is Standing.LOST:
            return "its successors are not known"
        if contested := self._copies.contested(id):
            return f"two different images of rank {few(contested)}"
        if len(worlds := self._copies.worlds(id)) != 1:
            return f"saved by worlds of {few(worlds)}"
        coverage = self._copies.coverage(id)
        return f"no copy of rank {few(coverage.lost if coverage else ())}"

    # --- events --------------------------------------------------------------------------

    def _report(self, event: Reported) -> None:
        if event.sequence < self._sequences.get(event.node_rank, 0):
            return
        self._sequences[event.node_rank] = event.sequence
        for epoch in event.epochs:
            self._record(epoch)
        self._copies.replace(event.node_rank, event.ranks)

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
        if (chosen := epoch or self._lineage.fresh) is not None:
            self._acknowledged.add(chosen)
            self._traced = None

    # --- actions -------------------------------------------------------------------------

    def _commits(self) -> Iterator[Committed]:
        """Announces each commit once. It remembers only the commits that still stand, so a step
        that was lost and comes back is announced again."""
        for tier in (one for one in NEAREST_FIRST if one in self.config.tiers):
            now, before = self.committed(tier), self._announced.get(tier, ())
            if tier is Tier.MEMORY or now is before:
                continue
            self._announced[tier] = now
            news = sorted({*now} - {*before})
            self._signatures.add(news, self._copies)
            yield from (Committed(tier, id) for id in news)

    def _retirements(self) -> Iterator[Retire]:
        for tier in NEAREST_FIRST:
            if tier is not Tier.MEMORY and tier in self.config.retention:
                for id in self.expendable(tier, self.config.retention[tier]):
                    if ranks := self.holders(id, tier):
                        yield Retire(tier, id, tuple(bits(ranks)))

    def _newest_of_this_life(self) -> StepId | None:
        """The newest complete step, if it is of the newest epoch; else None. A step of an older
        epoch may have any world size, because the ranks that run now have gone on from it."""
        newest = self.watermark(Tier.MEMORY)
        return newest if newest is not None and newest.epoch == self._lineage.current else None

    def _alarms(self) -> Iterator[Alarm]:
        now = {
            *self._conflicts,
            *two_writers(self._copies),
            *world_changed(self._copies, self._newest_of_this_life(), world=self.config.world),
            *self._signatures.stale(),
            *fresh_start(self._lineage),
        }
        fresh, self._alarmed = now - self._alarmed, now
        yield from sorted(fresh, key=lambda one: (one.kind, one.text))


def _from(tier: Tier) -> tuple[Tier, ...]:
    """The tiers that are farther than this one."""
    return NEAREST_FIRST[NEAREST_FIRST.index(tier) + 1 :]


def _places(places: Collection[tuple[int, Tier]]) -> str:
    named = [f"rank {rank} {tier}" for rank, tier in list(places)[:_RANKS_NAMED]]
    return ", ".join(named) + (", ..." if len(places) > _RANKS_NAMED else "")
