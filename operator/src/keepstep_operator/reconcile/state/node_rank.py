"""A node rank of a run: the pod that holds it, and what its sidecar said last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank


@dataclass(kw_only=True)
class Place:
    """One node rank: the pod that holds it, and what its sidecar said last. What is asked of a
    report again and again is worked out once: a run of thousands of ranks asks with each report.

    `since`: when this process of the sidecar was first heard, `heard_at`: last; by our clock.
    `past`: starts of sidecars of this pod that were replaced. `gone`: the pod is; `dropped`: what
    it held is out of the ledger, too. `stays`: its volumes outlive it, on its node.
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
    stays: bool = False

    @cached_property
    def own(self) -> tuple[ReportedRank, ...]:
        """The ranks that train, or trained, here; not those of which it only tells what is kept."""
        return tuple(one for one in self.report.ranks if not kept(one))

    @cached_property
    def own_ranks(self) -> frozenset[int]:
        """The same, by number."""
        return frozenset(one.rank for one in self.own)

    @cached_property
    def archive_ranks(self) -> frozenset[int]:
        """Those of them of which it told what is archived."""
        return frozenset(one.rank for one in self.own if one.archive_answer is not None)

    @cached_property
    def worlds(self) -> frozenset[tuple[bool, int]]:
        """Of all its ranks: whether a trainer is there, and the world it told."""
        return frozenset((one.alive, one.world) for one in self.report.ranks)

    @cached_property
    def staged(self) -> Mapping[EpochId, Mapping[int, int]]:
        """epoch -> rank -> the newest step that it staged."""
        found: dict[EpochId, dict[int, int]] = {}
        for one in self.report.ranks:
            if one.staged is not None:
                steps = found.setdefault(one.staged.epoch, {})
                steps[one.rank] = max(one.staged.step, steps.get(one.rank, 0))
        return found

    @cached_property
    def alive_ranks(self) -> frozenset[int]:
        """Those of which a trainer is there."""
        return frozenset(one.rank for one in self.report.ranks if one.alive)

    @cached_property
    def common(self) -> Mapping[Tier, frozenset[StepId]]:
        """Steps that all its own ranks hold, in memory and on its drives."""
        memory = [{held.id for held in one.memory} for one in self.own]
        local = [{held.id for held in one.local} for one in self.own]
        return {
            tier: frozenset(set.intersection(*each) if each else ())
            for tier, each in ((Tier.MEMORY, memory), (Tier.LOCAL, local))
        }

    @property
    def copies(self) -> tuple[ReportedRank, ...]:
        """The ranks of other pods of which this one keeps copies."""
        return tuple(one for one in self.report.ranks if one.peer)

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


def overtaken(place: Place, sender: Sender, report: Report) -> bool:
    """Whether something newer was heard of this place already."""
    if place.pod != sender.pod:
        return sender.created_at < place.created_at
    if place.report.started_at != report.started_at:
        return report.started_at in place.past
    return report.sequence < place.report.sequence


def renewed(place: Place | None, sender: Sender, report: Report, at: float) -> Place:
    """The place as this report leaves it; None: the pod is new there."""
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
        stays=sender.local_stays,
    )


def kept(one: ReportedRank) -> bool:
    """Whether a pod tells of this rank only because it keeps copies of it, or saw it archived.

    A rank of its own that has nothing here yet looks the same; it counts when its trainer comes.
    """
    return bool(one.peer or one.archive) and not (one.alive or one.memory or one.local)


_NEWEST_EPOCHS = 64


def epochs_needed(report: Report, *, most: int) -> tuple[Epoch, ...]:
    """The epochs of a report without those that no step, no restore and no later life names: a run
    that begins again each minute has thousands of them, and they decide nothing. The newest ones
    stay in any case; of more than `most` the oldest go, whose steps are then left alone."""
    if len(report.epochs) <= _NEWEST_EPOCHS:
        return report.epochs
    recorded = {epoch.id: epoch for epoch in report.epochs}
    named = {
        held.id.epoch
        for one in report.ranks
        for held in (*one.memory, *one.local, *one.peer, *one.archive)
    }
    named |= {one.epoch.id for one in report.restores}
    newest = sorted(recorded, reverse=True)
    pending = [*newest[:_NEWEST_EPOCHS], *(named & recorded.keys())]
    needed: set[EpochId] = set()
    while pending:
        id = pending.pop()
        if id in needed or id not in recorded:
            continue
        needed.add(id)
        if (parent := recorded[id].parent) is not None:
            pending.append(parent.epoch)
    return tuple(recorded[id] for id in sorted(needed)[-most:])
