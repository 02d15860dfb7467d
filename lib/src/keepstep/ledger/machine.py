"""The state machine that knows what a run has kept: reports in, watermarks and actions out.

In the manner of etcd's raft it does no I/O and knows no clock; the host does both, and its duties
are numbered in docs/ledger.md. All state can be rebuilt from new reports: a ledger that is
restarted, or moved from a sidecar to the operator, comes to the same answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from keepstep.ledger.copies import Copies
from keepstep.ledger.events import (
    NEAREST_FIRST,
    Action,
    Alarm,
    AlarmKind,
    Committed,
    EpochStarted,
    Event,
    FreshStartAcknowledged,
    LedgerConfig,
    NodeGone,
    Nothing,
    RankGone,
    Reported,
    RestorePlan,
    Retire,
    Unknown,
)
from keepstep.ledger.lineage import Lineage, Standing, trace
from keepstep.retention import retired
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier

_STEPS_NAMED = 3
_RANKS_NAMED = 8


class Ledger:
    """One run. `apply` events; obey the actions; ask `plan`, `committed`, `watermark`."""

    def __init__(self, config: LedgerConfig | None = None) -> None:
        self.config = config or LedgerConfig()
        self._copies = Copies()
        self._recorded: dict[EpochId, Epoch] = {}
        self._acknowledged: set[EpochId] = set()
        self._conflicts: set[str] = set()
        self._sequences: dict[int, int] = {}
        self._announced: set[Committed] = set()
        self._alarmed: set[Alarm] = set()
        self._signatures: dict[StepId, tuple[str | None, ...]] = {}
        self._lineage = Lineage()

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Take in one event. The same event twice changes nothing the second time."""
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
        self._lineage = self._trace()
        return (*self._commits(), *self._retirements(), *self._alarms())

    # --- asking --------------------------------------------------------------------------

    @property
    def lineage(self) -> Lineage:
        return self._lineage

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch on record, oldest first."""
        return tuple(self._recorded[id] for id in sorted(self._recorded))

    def highest_epoch(self) -> int:
        """The highest epoch number ever seen, 0 for none. The next epoch's is one more."""
        return max((id.number for id in {*self._recorded, *self._copies.epochs}), default=0)

    def is_dead(self, id: StepId) -> bool:
        """A later life of the run went on from before this step."""
        return self._lineage.standing(id) is Standing.DEAD

    def committed(self, tier: Tier) -> tuple[StepId, ...]:
        """Restorable steps that every rank holds on this tier or a stronger one, oldest first.

        For `Tier.MEMORY`: the steps that all ranks could restore, each from whatever tier.
        """
        return tuple(
            id
            for id in self._copies.steps
            if self._copies.complete(id, tier) and self._lineage.restorable(id)
        )

    def watermark(self, tier: Tier) -> StepId | None:
        """The newest committed step of this tier."""
        return max(self.committed(tier), default=None)

    def holders(self, id: StepId, tier: Tier) -> tuple[int, ...]:
        """The ranks of which this very tier holds the step."""
        return tuple(sorted(self._copies.ranks(id, (tier,))))

    def plan(self, ranks: Collection[int]) -> RestorePlan | Nothing | Unknown:
        """What should these ranks (all of the run) restore? A hint: their vote is what counts."""
        newest = self.watermark(Tier.MEMORY)
        if newest is None:
            return self._nothing(ranks)
        world = next(iter(self._copies.worlds(newest)))
        if set(ranks) != set(range(world)):
            return Unknown(
                f"step {newest} was saved by {world} ranks, but {len(ranks)} are running"
            )
        tiers = {rank: self._copies.nearest(newest, rank) for rank in sorted(ranks)}
        chosen = {rank: tier for rank, tier in tiers.items() if tier is not None}
        if waits_for := self._silent_before(chosen):
            return Unknown(f"no answer yet from {_places(waits_for)}", waits_for)
        return RestorePlan(newest, chosen)

    def _silent_before(self, chosen: dict[int, Tier]) -> tuple[tuple[int, Tier], ...]:
        """Tiers nearer than the chosen ones that did not answer: they may hold a newer step."""
        return tuple(
            (rank, tier)
            for rank, used in chosen.items()
            for tier in self.config.tiers
            if NEAREST_FIRST.index(tier) < NEAREST_FIRST.index(used)
            and self._copies.answer(rank, tier) is Answer.UNKNOWN
        )

    def _nothing(self, ranks: Collection[int]) -> Nothing | Unknown:
        """Step 0 needs NONE from every rank and every tier, and nothing held by anybody else."""
        answers = {
            (rank, tier): self._copies.answer(rank, tier)
            for rank in sorted(ranks)
            for tier in self.config.tiers
        }
        silent = tuple(place for place, said in answers.items() if said is Answer.UNKNOWN)
        if silent:
            return Unknown(f"no answer yet from {_places(silent)}", silent)
        if self._copies.steps:
            return Unknown(f"steps were found, but none is complete: {self._incomplete()}")
        if found := tuple(place for place, said in answers.items() if said is not Answer.NONE):
            return Unknown(f"there is something that cannot be restored on {_places(found)}")
        return Nothing()

    def _incomplete(self) -> str:
        named = reversed(self._copies.steps[-_STEPS_NAMED:])
        return "; ".join(f"{id} ({self._what_ails(id)})" for id in named)

    def _what_ails(self, id: StepId) -> str:
        standing = self._lineage.standing(id)
        if standing is Standing.DEAD:
            return "dead: a later epoch went on from before it"
        if standing is Standing.LOST:
            return "its successors are not known"
        if contested := self._copies.contested(id):
            return f"two different images of rank {_few(contested)}"
        if len(worlds := self._copies.worlds(id)) != 1:
            return f"saved by worlds of {_few(worlds)}"
        return f"no copy of rank {_few(set(range(*worlds)) - self._copies.ranks(id, Tier))}"

    # --- events --------------------------------------------------------------------------

    def _report(self, event: Reported) -> None:
        if event.sequence < self._sequences.get(event.node_rank, 0):
            return
        self._sequences[event.node_rank] = event.sequence
        for epoch in event.epochs:
            self._record(epoch)
        for rank, report in event.ranks.items():
            self._copies.replace(event.node_rank, rank, report)

    def _record(self, epoch: Epoch) -> None:
        known = self._recorded.setdefault(epoch.id, epoch)
        if known != epoch:
            # Deterministic whatever comes first: the earlier parent condemns more steps as dead,
            # so keep the later one.
            both = sorted((known, epoch), key=_parent_order)
            self._recorded[epoch.id] = both[-1]
            self._conflicts.add(
                f"epoch {epoch.id} has two parents: {both[0].parent} and {both[-1].parent}"
            )

    def _acknowledge(self, epoch: EpochId | None) -> None:
        if (chosen := epoch or self._lineage.fresh) is not None:
            self._acknowledged.add(chosen)

    def _trace(self) -> Lineage:
        return trace(self._recorded, seen=self._copies.epochs, acknowledged=self._acknowledged)

    # --- actions -------------------------------------------------------------------------

    def _commits(self) -> Iterator[Committed]:
        now = {Committed(tier, id) for tier in self.config.tiers for id in self.committed(tier)}
        # Remember only what still stands: a step that was lost and comes back is news again.
        fresh, self._announced = now - self._announced, now
        for commit in fresh:
            self._sign(commit)
        yield from sorted(fresh, key=lambda one: (NEAREST_FIRST.index(one.tier), one.id))

    def _retirements(self) -> Iterator[Retire]:
        for tier in NEAREST_FIRST:
            if tier is not Tier.MEMORY and tier in self.config.retention:
                for id in self._expendable(tier):
                    if ranks := self.holders(id, tier):
                        yield Retire(tier, id, ranks)

    def _expendable(self, tier: Tier) -> list[StepId]:
        """Steps of which no copy on this tier is needed any more, oldest first.

        The deletion rule: only when a newer live step is complete on an equal or stronger tier.
        """
        policy = self.config.retention[tier]
        alive = [id for id in self.committed(tier) if self._standing(id) is Standing.LIVE]
        if not alive:
            return []
        surplus = set(retired(alive, policy, written_at=self._written_at(alive)))
        return [
            id
            for id in self._copies.steps
            if id < alive[-1]
            and id not in policy.pinned
            and (
                id in surplus
                or self._standing(id) is Standing.DEAD
                or (self._standing(id) is Standing.LIVE and id not in alive)
            )
        ]

    def _standing(self, id: StepId) -> Standing:
        return self._lineage.standing(id)

    def _written_at(self, ids: Collection[StepId]) -> dict[StepId, float]:
        """The time of the last image of each step, where any image has one."""
        times = {
            id: [held.written_at for _, _, held in self._copies.of(id) if held.written_at]
            for id in ids
        }
        return {id: max(each) for id, each in times.items() if each}

    # --- alarms --------------------------------------------------------------------------

    def _alarms(self) -> Iterator[Alarm]:
        now = set(self._standing_alarms())
        fresh, self._alarmed = now - self._alarmed, now
        yield from sorted(fresh, key=lambda one: (one.kind, one.text))

    def _standing_alarms(self) -> Iterator[Alarm]:
        for text in self._conflicts:
            yield Alarm(AlarmKind.EPOCH_CONFLICT, text)
        yield from self._same_number()
        yield from self._two_writers()
        yield from self._world_changed()
        yield from self._stale()
        if (fresh := self._lineage.fresh) is not None:
            yield Alarm(
                AlarmKind.FRESH_START,
                f"epoch {fresh} began at step 0 although older steps exist; they are kept until "
                "somebody acknowledges the fresh start",
            )

    def _same_number(self) -> Iterator[Alarm]:
        numbers: dict[int, list[EpochId]] = {}
        for id in sorted({*self._recorded, *self._copies.epochs}):
            numbers.setdefault(id.number, []).append(id)
        for ids in numbers.values():
            if len(ids) > 1:
                names = " and ".join(str(id) for id in ids)
                yield Alarm(AlarmKind.EPOCH_CONFLICT, f"epochs {names} began side by side")

    def _two_writers(self) -> Iterator[Alarm]:
        for id in self._copies.steps:
            if contested := self._copies.contested(id):
                text = f"two different images of step {id}, rank {_few(contested)}"
                yield Alarm(AlarmKind.TWO_WRITERS, text)
        for rank, nodes in sorted(self._copies.memory_holders().items()):
            if len(nodes) > 1:
                text = f"rank {rank} is in the memory of node ranks {_few(nodes)}"
                yield Alarm(AlarmKind.TWO_WRITERS, text)

    def _world_changed(self) -> Iterator[Alarm]:
        newest = self.watermark(Tier.MEMORY)
        if newest is None or self.config.world is None:
            return
        for saved in self._copies.worlds(newest) - {self.config.world}:
            text = f"step {newest} was saved by {saved} ranks, but {self.config.world} are running"
            yield Alarm(AlarmKind.WORLD_CHANGED, text)

    def _sign(self, commit: Committed) -> None:
        """Remember the parameters' digests of the newest commits: retention deletes the shards."""
        if commit.tier is Tier.MEMORY:
            return
        world = next(iter(self._copies.worlds(commit.id)))
        digests = {
            rank: held.params_digest
            for rank, _, held in self._copies.of(commit.id)
            if held.params_digest is not None
        }
        self._signatures[commit.id] = tuple(digests.get(rank) for rank in range(world))
        for old in sorted(self._signatures)[: -self.config.stale_after]:
            del self._signatures[old]

    def _stale(self) -> Iterator[Alarm]:
        ids = sorted(self._signatures)
        same = set(self._signatures.values())
        if len(ids) < self.config.stale_after or len(same) != 1 or None in next(iter(same)):
            return
        if ids[0].epoch == ids[-1].epoch:
            yield Alarm(
                AlarmKind.STALE_SNAPSHOT,
                f"the parameters of all ranks are the same since step {ids[0]}, "
                f"{len(ids)} commits ago: is the model that is trained the one that is saved?",
            )


def _parent_order(epoch: Epoch) -> tuple[bool, StepId]:
    return (epoch.parent is not None, epoch.parent or StepId(epoch.id, -1))


def _places(places: Collection[tuple[int, Tier]]) -> str:
    named = [f"rank {rank} {tier}" for rank, tier in sorted(places)[:_RANKS_NAMED]]
    return ", ".join(named) + (", ..." if len(places) > _RANKS_NAMED else "")


def _few(numbers: Collection[int]) -> str:
    named = [str(number) for number in sorted(numbers)[:_RANKS_NAMED]]
    return ", ".join(named) + (", ..." if len(numbers) > _RANKS_NAMED else "")
