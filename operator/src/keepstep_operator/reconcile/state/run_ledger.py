"""One run's ledger and the last word of each node rank: the host's duties of docs/ledger.md.

Reports may come late, twice, from a sidecar that was replaced, or from a pod that is going. Here
they are put in order, and what a pod takes with it when it goes is taken out of the ledger. No
clock but the reconciler's own (passed in) is ever compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from keepstep.core.ledger import (
    Action,
    FreshStartAcknowledged,
    Ledger,
    LedgerConfig,
    NodeGone,
    Nothing,
    RankGone,
    RankReport,
    Reported,
    RestorePlan,
    Unknown,
)
from keepstep.core.retention import Retention
from keepstep.steps import Answer, EpochId, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank, ReportedShard
from keepstep_operator.reconcile.state.durability import Lying, by_step, refuges, sole_nodes
from keepstep_operator.reconcile.state.node_rank import Place, Sender, kept, overtaken, renewed
from keepstep_operator.reconcile.state.orphaned_shards import OrphanedShards

_TIERS = (Tier.MEMORY, Tier.LOCAL)
LARGEST_WORLD = 65_536
MOST_RANKS = 1024
"""Of one pod."""
MOST_EPOCHS = 8192
"""On record, of one run; beyond that the ledger is made again from what is there now."""


@dataclass(frozen=True, kw_only=True)
class Safety:
    """`step`: the newest one that is left whichever single node is lost (or that is archived, which
    `archived` names). `sole`: nodes that hold the only copy of something of the newest commit.
    `refuges`: for each node the newest step that its loss would leave."""

    step: StepId | None = None
    archived: StepId | None = None
    sole: frozenset[str] = frozenset()
    refuges: frozenset[StepId] = frozenset()


class RunLedger:
    """The ledger of one run and the places that feed it."""

    def __init__(self) -> None:
        self._keep = Retention()
        self._config = LedgerConfig()  # no retention: what may go is worked out when it is told
        self.core = Ledger(self._config)
        self.places: dict[int, Place] = {}
        self.helpers: dict[int, Place] = {}
        """Pods that serve what others left behind, by the number that stands for a node rank."""
        self.orphans = OrphanedShards()
        self._archived = Archived()
        self.progress: StepId | None = None
        self._acknowledged: set[EpochId] = set()
        self._told: dict[int, set[int]] = {}
        self._ordered = 0
        self._changes = 0
        self._most_epochs = MOST_EPOCHS
        self._most_world = LARGEST_WORLD
        self._safety: tuple[int, Safety] | None = None

    # --- changing ------------------------------------------------------------------------

    def configure(self, *, keep: Retention, pins: Iterable[StepId], archived: bool = False) -> None:
        """What the policy and the CheckpointRun ask to keep on local. `archived`: the run has an
        archive, so that it must answer, too, before a start at step 0 is right.

        A peer need not: copies there are told of by who keeps them, and nobody can say that there
        are none.
        """
        self._configure(
            replace(
                self._config,
                tiers=_TIERS + ((Tier.ARCHIVE,) if archived else ()),
            )
        )
        self._keep = replace(keep, pinned=frozenset(pins))

    def take(
        self, sender: Sender, report: Report, *, at: float, most_world: int = LARGEST_WORLD
    ) -> tuple[Action, ...] | None:
        """One report; None when something newer was heard of this node rank already. `most_world`:
        how many ranks the pods that there are can run."""
        self._changes += 1
        place = self.places.get(sender.node_rank)
        if place is not None and overtaken(place, sender, report):
            return None
        said: list[Action] = []
        if place is not None and place.pod != sender.pod:
            # the first pod that moves takes the watermark with it; the others left the same step
            commit = self.core.watermark(Tier.LOCAL) or self.orphans.newest
            self.orphans.moved(sender.node_rank, place, to=sender.node, commit=commit)
            stays = sender.local_stays and place.node == sender.node
            said += self.pod_gone(place.pod, local_stays=stays)
            place = None
        if report.ready:
            self.orphans.back(sender.node_rank, sender.node)
        said += self._forget_unnamed(sender.node_rank, report)
        self.places[sender.node_rank] = renewed(place, sender, report, at)
        self._ordered += 1
        believed = self._archived.believed(report, heard=self._heard(sender.node_rank))
        said += self.core.apply(believed.as_reported(sender.node_rank, ordered=self._ordered))
        if len(self.core.epochs) > self._most_epochs:
            said += self._begin_anew(self._there())
            self._most_epochs = max(MOST_EPOCHS, 2 * len(self.core.epochs))
        self._most_world = most_world
        self._know_world()
        self._advance()
        return tuple(said)

    def pod_gone(self, pod: str, *, local_stays: bool) -> tuple[Action, ...]:
        """The pod is gone, its memory with it; `local_stays`: its volumes outlive it."""
        self._changes += 1
        for node_rank, place in self.places.items():
            if place.pod == pod and not place.dropped:
                known, place.gone = place.gone, True
                if local_stays:
                    return () if known else self._memory_gone(node_rank)
                place.dropped = True
                self._told.pop(node_rank, None)
                said = self.core.apply(NodeGone(node_rank))
                return said + self._forget_epochs()
        return ()

    def helped(self, sender: Sender, report: Report, *, at: float) -> tuple[Action, ...]:
        """What a helper pod serves: copies of other pods' shards, and nothing of its own."""
        before = self.helpers.get(sender.node_rank)
        if before is not None and overtaken(before, sender, report):
            return ()
        self._changes += 1
        self._ordered += 1
        said = list(self._forget_unnamed(sender.node_rank, report))
        self.helpers[sender.node_rank] = renewed(before, sender, report, at)
        event = report.as_reported(sender.node_rank, ordered=self._ordered)
        return (*said, *self.core.apply(event))

    def helper_gone(self, number: int) -> tuple[Action, ...]:
        """It serves no more."""
        self._changes += 1
        self._told.pop(number, None)
        if self.helpers.pop(number, None) is None:
            return ()
        return self.core.apply(NodeGone(number)) + self._forget_epochs()

    def acknowledge(self, epoch: EpochId) -> tuple[Action, ...]:
        """Somebody knows that this epoch rightly began anew."""
        self._acknowledged.add(epoch)
        return self.core.apply(FreshStartAcknowledged(epoch))

    def _memory_gone(self, node_rank: int) -> tuple[Action, ...]:
        lost = RankReport(sealed={Tier.MEMORY: ()}, answers={Tier.MEMORY: Answer.UNKNOWN})
        self._ordered += 1
        event = Reported(
            node_rank=node_rank,
            ranks=dict.fromkeys((one.rank for one in self.places[node_rank].own), lost),
            sequence=self._ordered,
        )
        return self.core.apply(event)

    def _forget_unnamed(self, node_rank: int, report: Report) -> Iterator[Action]:
        """Ranks that this node had and, now that its volumes are scanned, has no more."""
        known, named = self._told.setdefault(node_rank, set()), {one.rank for one in report.ranks}
        if report.ready:
            for rank in sorted(known - named):
                yield from self.core.apply(RankGone(rank, node_rank))
            known.clear()
        known |= named

    def _forget_epochs(self) -> tuple[Action, ...]:
        """An epoch that nobody has a record of any more must not outrank one that begins anew.

        Only then is the ledger made again from the last reports: that costs one event a node. What
        is in the archive has its epochs on record there.
        """
        if self.archived():
            return ()
        there = self._there()
        recorded = {epoch.id for _, place in there for epoch in place.report.epochs}
        if all(epoch.id in recorded for epoch in self.core.epochs):
            return ()
        return self._begin_anew(there)

    def _there(self) -> list[tuple[int, Place]]:
        every = (*self.places.items(), *self.helpers.items())
        return [one for one in every if not one[1].dropped]

    def _begin_anew(self, there: Iterable[tuple[int, Place]]) -> tuple[Action, ...]:
        """The ledger from the last reports alone."""
        self.core = Ledger(self._config)
        said: list[Action] = []
        for node_rank, place in there:
            self._ordered += 1
            said += self.core.apply(place.report.as_reported(node_rank, ordered=self._ordered))
            if place.gone:
                said += self._memory_gone(node_rank)
        for epoch in self._acknowledged:
            said += self.core.apply(FreshStartAcknowledged(epoch))
        return tuple(said)

    def _heard(self, but: int) -> set[int]:
        """Ranks whose own pods, all `but` one, are there and have told what is archived."""
        there = (place for at, place in self.places.items() if at != but and not place.gone)
        return set().union(*(place.archive_ranks for place in there))

    def _know_world(self) -> None:
        told = set().union(*(place.worlds for place in self.places.values() if not place.gone))
        there = [(alive, world) for alive, world in told if world <= self._most_world]
        living = [world for alive, world in there if alive]
        world = max(living or [world for _, world in there], default=None)
        if world != self._config.world:
            self._configure(replace(self._config, world=world))

    def _configure(self, config: LedgerConfig) -> None:
        self._config = self.core.config = config

    def _advance(self) -> None:
        """The newest step that all ranks staged, or the one that the newest epoch went on from."""
        current = self.core.lineage.current
        if current is None:
            return
        staged = self._staged(current)
        if staged is None:
            parents = {epoch.id: epoch.parent for epoch in self.core.epochs}
            parent = parents.get(current)
            staged = parent.step if parent else 0
        here = StepId(current, staged)
        # A new epoch replaces what was: with all its records gone, its number may even be lower.
        known = self.progress
        if known is None or known.epoch != current or here > known:
            self.progress = here

    def _staged(self, epoch: EpochId) -> int | None:
        """Of this epoch, by all ranks of the world; None while one has none."""
        newest: dict[int, int] = {}
        for place in self.places.values():
            steps = {} if place.gone else place.staged.get(epoch, {})
            twice = {rank: max(newest[rank], steps[rank]) for rank in newest.keys() & steps.keys()}
            newest.update(steps)
            newest.update(twice)
        world = self.world
        if not world or len(newest) < world:
            return None
        return min(newest.values())

    # --- asking --------------------------------------------------------------------------

    def ranks(self) -> Iterator[ReportedRank]:
        """Every rank that a pod which is there has told of."""
        for place in self.places.values():
            if not place.gone:
                yield from place.report.ranks

    @property
    def world(self) -> int | None:
        """Ranks running now: as living trainers say, else as those did that are gone."""
        return self._config.world

    @property
    def settled(self) -> bool:
        """All ranks have told, from pods that are there and have scanned their volumes."""
        there = [place for place in self.places.values() if not place.gone]
        if self.world is None or not all(place.settled for place in there):
            return False
        told: set[int] = set().union(*(place.own_ranks for place in there))
        return len(told) >= self.world

    def committed(self) -> StepId | None:
        """The newest step that is durable on every rank, as far as reports show now."""
        return max(self.commits(), default=None)

    def commits(self) -> tuple[StepId, ...]:
        """All steps that are durable on every rank, oldest first."""
        return self.core.committed(Tier.LOCAL)

    def common(self) -> StepId | None:
        """The newest step that all ranks could restore now, each from whatever tier."""
        return self.core.watermark(Tier.MEMORY)

    def archived(self) -> tuple[StepId, ...]:
        """Steps that the archive holds whole, oldest first."""
        return self.core.committed(Tier.ARCHIVE)

    def plan(self) -> StepId | None:
        """The step that a restart would restore, when that is certain."""
        plan = self._plan()
        return plan.id if isinstance(plan, RestorePlan) else None

    def doubt(self) -> str:
        """Why nobody can say what a restart would restore, '' when that is certain."""
        plan = self._plan()
        return plan.reason if isinstance(plan, Unknown) else ""

    def _plan(self) -> RestorePlan | Nothing | Unknown | None:
        return None if self.world is None else self.core.plan(range(self.world))

    def safety(self) -> Safety:
        """What the loss of one node would leave."""
        if self._safety is None or self._safety[0] != self._changes:
            self._safety = self._changes, self._judge()
        return self._safety[1]

    def _judge(self) -> Safety:
        archived = max(self.archived(), default=None)
        places = (*self.places.values(), *self.helpers.values())
        lying, world = by_step(_lying(places)), self.world or 0
        newest_first = sorted(self.core.committed(Tier.LOCAL), reverse=True)
        sole = {
            id: sole_nodes(lying.get(id, ()), world=_world_of(lying.get(id, ()), world))
            for id in newest_first
            if archived is None or id > archived
        }
        apart = next((id for id in newest_first if sole.get(id) == frozenset()), None)
        safe = max((id for id in (apart, archived) if id is not None), default=None)
        alone = sole.get(newest_first[0]) if newest_first else None
        return Safety(
            step=safe, archived=archived, sole=alone or frozenset(), refuges=refuges(sole)
        )

    def unaided(self) -> StepId | None:
        """The newest step that is whole on drives (or archived) without what helper pods serve."""
        lying = by_step(_lying(self.places.values()))
        whole = (
            id
            for id in sorted(lying, reverse=True)
            if self.core.lineage.restorable(id)
            and sole_nodes(lying[id], world=_world_of(lying[id], 0)) is not None
        )
        newest = (next(whole, None), *self.archived())
        return max((id for id in newest if id is not None), default=None)

    def expendable(self) -> tuple[StepId, ...]:
        """Steps of which no copy on local is needed, oldest first.

        Not those that the loss of a node would leave: where a link is slower than the steps these
        are older than what retention keeps.
        """
        gone = self.core.expendable(Tier.LOCAL, self._keep)
        kept = self.safety().refuges if gone else ()
        return tuple(id for id in gone if id not in kept)

    def local(self, node_rank: int) -> set[StepId]:
        """Steps of which this node rank has a shard on its volumes."""
        place = self.places.get(node_rank)
        if place is None or place.gone:
            return set()
        return {one.id for rank in place.report.ranks for one in rank.local}


def _lying(places: Iterable[Place]) -> Iterator[Lying]:
    """Every durable image on a node's drive that is still there, also of pods that left it.

    From a pod that serves no peers nobody else can have it: there it is no rank's twin.
    """
    for place in places:
        serves = bool(place.report.peer_address)
        for one in () if place.dropped else place.report.ranks:
            for held in (*one.local, *one.peer):
                shown = held if serves or not held.twins else replace(held, twins=())
                yield Lying(place.node, one.rank, shown)


def _world_of(copies: Sequence[Lying], world: int) -> int:
    """Ranks that saved the step; after a restart with others, not those that run now."""
    return copies[0].held.world if copies else world


class Archived:
    """What is believed of the archive: each rank's own pod knows all of it, others tell the newest.

    The pods of the first and of the last rank tell of all ranks, but for a large run of the newest
    steps only. That must not make the older ones look gone.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReportedShard, ...]] = {}

    def believed(self, report: Report, *, heard: Collection[int]) -> Report:
        """The report as the ledger should hear it. `heard`: ranks whose own pods are there and have
        told of the archive themselves."""
        return replace(report, ranks=tuple(self._believed(one, heard) for one in report.ranks))

    def _believed(self, one: ReportedRank, heard: Collection[int]) -> ReportedRank:
        if one.archive_answer is None:
            return one
        if kept(one):
            if one.rank in heard:
                return replace(one, archive=(), archive_answer=None)
            one = replace(one, archive=(*self._older(one), *one.archive))
        self._known[one.rank] = one.archive
        return one

    def _older(self, one: ReportedRank) -> tuple[ReportedShard, ...]:
        """Known, and too old to be named by a pod that names the newest."""
        if not one.archive:
            return ()
        oldest = min(held.id for held in one.archive)
        return tuple(held for held in self._known.get(one.rank, ()) if held.id < oldest)
