"""One run's ledger and the last word of each node rank: the host's duties of docs/ledger.md.

Reports may come late, twice, from a sidecar that was replaced, or from a pod that is going. Here
they are put in order, and what a pod takes with it when it goes is taken out of the ledger. No
clock but the reconciler's own (passed in) is ever compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from keepstep.ledger import (
    Action,
    FreshStartAcknowledged,
    Ledger,
    LedgerConfig,
    NodeGone,
    RankGone,
    RankReport,
    Reported,
    RestorePlan,
)
from keepstep.reports import Report, ReportedRank
from keepstep.retention import Retention
from keepstep.steps import Answer, EpochId, StepId, Tier


@dataclass(kw_only=True)
class Place:
    """One node rank: the pod that holds it, and what its sidecar said last.

    `since`: when this process of the sidecar was first heard, `heard_at`: last; by our clock.
    `past`: starts of sidecars of this pod that were replaced. `gone`: the pod is; `dropped`: what
    it held is out of the ledger, too.
    """

    pod: str
    created_at: str
    node: str
    report: Report
    since: float
    heard_at: float
    past: set[float] = field(default_factory=set)
    gone: bool = False
    dropped: bool = False

    @property
    def settled(self) -> bool:
        """Its silence about a step means that the step is not there."""
        return not self.gone and self.report.ready


@dataclass(frozen=True, kw_only=True)
class Sender:
    """The pod that a report came from. `created_at` as the API server wrote it: it sorts.
    `local_stays`: its volumes outlive it, on its node."""

    pod: str
    node_rank: int
    node: str
    created_at: str
    local_stays: bool


class Host:
    """The ledger of one run and the places that feed it."""

    def __init__(self, *, keep: int = 2) -> None:
        self._config = LedgerConfig(retention={Tier.LOCAL: Retention(last=keep)})
        self.ledger = Ledger(self._config)
        self.places: dict[int, Place] = {}
        self.progress: StepId | None = None
        self._acknowledged: set[EpochId] = set()
        self._told: dict[int, set[int]] = {}
        self._ordered = 0

    # --- changing ------------------------------------------------------------------------

    def configure(self, *, keep: int, pins: Iterable[StepId]) -> None:
        """What the policy and the CheckpointRun ask to keep on local."""
        self._configure(
            replace(
                self._config,
                retention={Tier.LOCAL: Retention(last=keep, pinned=frozenset(pins))},
            )
        )

    def take(self, sender: Sender, report: Report, *, at: float) -> tuple[Action, ...] | None:
        """One report; None when something newer was heard of this node rank already."""
        place = self.places.get(sender.node_rank)
        if place is not None and _overtaken(place, sender, report):
            return None
        said: list[Action] = []
        if place is not None and place.pod != sender.pod:
            stays = sender.local_stays and place.node == sender.node
            said += self.pod_gone(place.pod, local_stays=stays)
            place = None
        said += self._forget_unnamed(sender.node_rank, report)
        self.places[sender.node_rank] = _renewed(place, sender, report, at)
        self._ordered += 1
        said += self.ledger.apply(report.as_reported(sender.node_rank, ordered=self._ordered))
        self._know_world()
        self._advance()
        return tuple(said)

    def pod_gone(self, pod: str, *, local_stays: bool) -> tuple[Action, ...]:
        """The pod is gone, its memory with it; `local_stays`: its volumes outlive it."""
        for node_rank, place in self.places.items():
            if place.pod == pod and not place.dropped:
                known, place.gone = place.gone, True
                if local_stays:
                    return () if known else self._memory_gone(node_rank)
                place.dropped = True
                self._told.pop(node_rank, None)
                said = self.ledger.apply(NodeGone(node_rank))
                return said + self._forget_epochs()
        return ()

    def acknowledge(self, epoch: EpochId) -> tuple[Action, ...]:
        """Somebody knows that this epoch rightly began anew."""
        self._acknowledged.add(epoch)
        return self.ledger.apply(FreshStartAcknowledged(epoch))

    def _memory_gone(self, node_rank: int) -> tuple[Action, ...]:
        lost = RankReport(sealed={Tier.MEMORY: ()}, answers={Tier.MEMORY: Answer.UNKNOWN})
        self._ordered += 1
        event = Reported(
            node_rank=node_rank,
            ranks=dict.fromkeys(self._told[node_rank], lost),
            sequence=self._ordered,
        )
        return self.ledger.apply(event)

    def _forget_unnamed(self, node_rank: int, report: Report) -> Iterator[Action]:
        """Ranks that this node had and, now that its volumes are scanned, has no more."""
        known, named = self._told.setdefault(node_rank, set()), {one.rank for one in report.ranks}
        if report.ready:
            for rank in sorted(known - named):
                yield from self.ledger.apply(RankGone(rank, node_rank))
            known.clear()
        known |= named

    def _forget_epochs(self) -> tuple[Action, ...]:
        """An epoch that nobody has a record of any more must not outrank one that begins anew.

        Only then is the ledger made again from the last reports: that costs one event a node.
        """
        there = [one for one in self.places.items() if not one[1].dropped]
        recorded = {epoch.id for _, place in there for epoch in place.report.epochs}
        if all(epoch.id in recorded for epoch in self.ledger.epochs):
            return ()
        self.ledger = Ledger(self._config)
        said: list[Action] = []
        for node_rank, place in there:
            self._ordered += 1
            said += self.ledger.apply(place.report.as_reported(node_rank, ordered=self._ordered))
            if place.gone:
                said += self._memory_gone(node_rank)
        for epoch in self._acknowledged:
            said += self.ledger.apply(FreshStartAcknowledged(epoch))
        return tuple(said)

    def _know_world(self) -> None:
        there = [(one.alive, one.world) for one in self.ranks()]
        living = [world for alive, world in there if alive]
        world = max(living or [world for _, world in there], default=None)
        if world != self._config.world:
            self._configure(replace(self._config, world=world))

    def _configure(self, config: LedgerConfig) -> None:
        self._config = self.ledger.config = config

    def _advance(self) -> None:
        """The newest step that all ranks staged, or the one that the newest epoch went on from."""
        current = self.ledger.lineage.current
        if current is None:
            return
        staged = self._staged(current)
        if staged is None:
            parents = {epoch.id: epoch.parent for epoch in self.ledger.epochs}
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
        for one in self.ranks():
            if one.staged is not None and one.staged.epoch == epoch:
                newest[one.rank] = max(one.staged.step, newest.get(one.rank, 0))
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
        told = {one.rank for one in self.ranks()}
        all_settled = all(place.settled for place in self.places.values())
        return all_settled and self.world is not None and len(told) >= self.world

    def committed(self) -> StepId | None:
        """The newest step that is durable on every rank, as far as reports show now."""
        return self.ledger.watermark(Tier.LOCAL)

    def common(self) -> StepId | None:
        """The newest step that all ranks could restore now, each from whatever tier."""
        return self.ledger.watermark(Tier.MEMORY)

    def plan(self) -> StepId | None:
        """The step that a restart would restore, when that is certain."""
        if self.world is None:
            return None
        plan = self.ledger.plan(range(self.world))
        return plan.id if isinstance(plan, RestorePlan) else None

    def expendable(self) -> tuple[StepId, ...]:
        """Steps of which no copy on local is needed, oldest first."""
        policy = self._config.retention[Tier.LOCAL]
        return tuple(self.ledger.expendable(Tier.LOCAL, policy))

    def local(self, node_rank: int) -> set[StepId]:
        """Steps of which this node rank has a shard on its volumes."""
        place = self.places.get(node_rank)
        if place is None or place.gone:
            return set()
        return {one.id for rank in place.report.ranks for one in rank.local}


def _overtaken(place: Place, sender: Sender, report: Report) -> bool:
    if place.pod != sender.pod:
        return sender.created_at < place.created_at
    if place.report.started_at != report.started_at:
        return report.started_at in place.past
    return report.sequence < place.report.sequence


def _renewed(place: Place | None, sender: Sender, report: Report, at: float) -> Place:
    past, since = set(place.past) if place else set(), place.since if place else at
    if place is not None and place.report.started_at != report.started_at:
        past.add(place.report.started_at)
        since = at
    return Place(
        pod=sender.pod,
        created_at=sender.created_at,
        node=sender.node,
        report=report,
        since=since,
        heard_at=at,
        past=past,
    )
