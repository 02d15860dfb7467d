"""A node rank of a run: the pod that holds it, and what its sidecar reported last.

Only the ledger knows where images lie; this module has the rest of each report. Ranks are bits of
an integer, as in the ledger.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from typing import TypeVar

from keepstep.core.commit_rule import RankBitmapUnion
from keepstep.steps import IN_POD, Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import Report, ReportedRanks

T = TypeVar("T")


RankState = tuple[int, bool, StepId | None]
"""The world that a rank reported, whether its trainer is running, and its newest staged step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRankBitmaps:
    """What was reported of the ranks of a place beside their images, as bitmaps.

    `own`: the ranks that train, or trained, here, without those of which it only keeps or reports
    copies. `copied`: the ranks of other pods of which it keeps copies. `archive`: by answer, the
    ranks of which it reported what is archived. `states`: by state, the ranks that are in it.
    """

    own: int = 0
    copied: int = 0
    archive: Mapping[TierAnswer, int] = field(default_factory=dict)
    states: Mapping[RankState, int] = field(default_factory=dict)

    @property
    def all(self) -> int:
        """All ranks of which anything was reported."""
        return functools.reduce(operator.or_, self.states.values(), 0)

    def after(
        self, reports: Iterable[ReportedRanks], held: Mapping[Tier, int]
    ) -> ReportedRankBitmaps:
        """The sets after a report. `held`: by tier, the ranks of which the ledger has an image of
        this place."""
        own, copied = self.own, self.copied
        archive, states = dict(self.archive), dict(self.states)
        here, copies = held[Tier.MEMORY] | held[Tier.LOCAL], held[Tier.PEER]
        for report in reports:
            ranks = report.bits
            _move(states, ranks, (report.world, report.alive, report.staged))
            if (listed := report.tiers.get(Tier.ARCHIVE)) is not None:
                _move(archive, ranks, listed.answer)
            archived = archive.get(TierAnswer.STEPS, 0)
            if listed is not None and listed.gone is None:
                archived = ranks if listed.shards else 0
            own &= ~ranks
            own |= ranks if report.alive else ranks & (here | ~(copies | archived))
            copied = copied & ~ranks | copies & ranks
        return ReportedRankBitmaps(own=own, copied=copied, archive=archive, states=states)


def _move(sets: dict[T, int], ranks: int, to: T) -> None:
    """Put these ranks into one of the sets, and out of the others."""
    for key, there in list(sets.items()):
        if left := there & ~ranks:
            sets[key] = left
        else:
            del sets[key]
    sets[to] = sets.get(to, 0) | ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRankState:
    """One node rank: the pod that holds it, and what its sidecar reported last. Fields that are
    needed with each report are computed once, since a run may have thousands of ranks.

    `alive`: the ranks whose trainer is running. `worlds`: for all its ranks, whether the trainer is
    running and which world it reported. `staged`: for each newest staged step, the ranks that
    staged it.

    `sidecar`: the last report, without what is in the ledger or above. `reported_at`: when it came,
    by the leader's clock. `gone`: the pod is gone. `dropped`: its images are removed from the
    ledger, too. `stays`: its volumes outlive it, on its node.
    """

    pod: str
    node: str
    sidecar: Report
    epochs: tuple[Epoch, ...]
    ranks: ReportedRankBitmaps
    reported_at: float
    gone: bool = False
    dropped: bool = False
    stays: bool = False
    alive: int = field(init=False)
    worlds: frozenset[tuple[bool, int]] = field(init=False)
    staged: Mapping[StepId, int] = field(init=False)

    def __post_init__(self) -> None:
        alive, staged = 0, dict[StepId, int]()
        for (_, lives, newest), ranks in self.ranks.states.items():
            alive |= ranks if lives else 0
            if newest is not None:
                staged[newest] = staged.get(newest, 0) | ranks
        object.__setattr__(self, "alive", alive)
        object.__setattr__(self, "staged", staged)
        worlds = frozenset((lives, world) for world, lives, _ in self.ranks.states)
        object.__setattr__(self, "worlds", _shared(worlds))

    @property
    def own_ranks(self) -> int:
        """See `ReportedRankBitmaps`."""
        return self.ranks.own

    @property
    def archive_reporting_ranks(self) -> int:
        """The ranks of its own of which it reported what is archived."""
        return self.own_ranks & functools.reduce(operator.or_, self.ranks.archive.values(), 0)

    @property
    def is_report_complete(self) -> bool:
        """Whether a step that this place does not report is certainly not there."""
        return not self.gone and self.sidecar.ready


class NodeRankStates(Mapping[int, NodeRankState]):
    """All places of a run by node rank, and sums over those whose pods exist. The sums are kept up
    to date, since each report changes one place of thousands. `moved` grows when the pod, node or
    peer address of a place changes."""

    def __init__(self) -> None:
        self._of: dict[int, NodeRankState] = {}
        self.moved = 0
        self.own, self.alive = RankBitmapUnion(), RankBitmapUnion()
        self._unsettled: set[int] = set()
        self._worlds: Counter[frozenset[tuple[bool, int]]] = Counter()
        self._staged: dict[StepId, RankBitmapUnion] = {}

    def __getitem__(self, node_rank: int) -> NodeRankState:
        return self._of[node_rank]

    def __setitem__(self, node_rank: int, now: NodeRankState) -> None:
        before = self._of.get(node_rank)
        self._of[node_rank] = now
        was, place = _there(before), _there(now)
        if _found(before) != _found(now):
            self.moved += 1
        self.own.replace_bitmap(node_rank, place.own_ranks if place else 0)
        self.alive.replace_bitmap(node_rank, place.alive if place else 0)
        unsettled = place is not None and not place.is_report_complete
        self._unsettled.add(node_rank) if unsettled else self._unsettled.discard(node_rank)
        self._count(was, -1)
        self._count(place, 1)
        self._stage(node_rank, was, place)

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def items(self) -> ItemsView[int, NodeRankState]:
        return self._of.items()

    def values(self) -> ValuesView[NodeRankState]:
        return self._of.values()

    def iterate_present_states(self) -> Iterator[NodeRankState]:
        return (place for place in self._of.values() if not place.gone)

    @property
    def are_reports_complete(self) -> bool:
        """Whether a step that no place reports is certainly at none of them."""
        return not self._unsettled

    @property
    def worlds(self) -> set[tuple[bool, int]]:
        """As `NodeRankState.worlds`."""
        return set().union(*self._worlds)

    def map_staged_steps_to_ranks(self, epoch: EpochId) -> dict[int, int]:
        """For each newest staged step of this epoch, the ranks that staged it, as a bitmap."""
        return {
            step_id.step: ranks.once
            for step_id, ranks in self._staged.items()
            if step_id.epoch == epoch
        }

    def _count(self, place: NodeRankState | None, by: int) -> None:
        if place is not None:
            self._worlds[place.worlds] += by
            if not self._worlds[place.worlds]:
                del self._worlds[place.worlds]

    def _stage(
        self, node_rank: int, was: NodeRankState | None, place: NodeRankState | None
    ) -> None:
        now = place.staged if place is not None else {}
        left = (step_id for step_id in was.staged if step_id not in now) if was is not None else ()
        for step_id, ranks in (*now.items(), *((step_id, 0) for step_id in left)):
            at = self._staged.setdefault(step_id, RankBitmapUnion())
            at.replace_bitmap(node_rank, ranks)
            if not at.once:
                del self._staged[step_id]


def _there(place: NodeRankState | None) -> NodeRankState | None:
    return None if place is None or place.gone else place


def _found(place: NodeRankState | None) -> tuple[object, ...]:
    """What other pods need to find it."""
    return () if place is None else (place.pod, place.node, place.gone, place.sidecar.peer_address)


@dataclass(frozen=True, kw_only=True)
class ReportingPod:
    """The pod that a report came from. `local_stays`: its volumes outlive it, on its node."""

    pod: str
    node_rank: int
    node: str
    local_stays: bool


def is_stale_report(place: NodeRankState, sender: ReportingPod, report: Report) -> bool:
    """Whether a newer report of the same sidecar is known already."""
    return _is_same(place, sender, report) and report.sequence < place.sidecar.sequence


def is_report_applicable(place: NodeRankState, sender: ReportingPod, report: Report) -> bool:
    """Whether the changes in this report apply to what is known."""
    return _is_same(place, sender, report) and report.since == place.sidecar.sequence


def _is_same(place: NodeRankState, sender: ReportingPod, report: Report) -> bool:
    return (place.pod, place.sidecar.started_at) == (sender.pod, report.started_at)


def state_after_report(
    sender: ReportingPod,
    report: Report,
    at: float,
    *,
    epochs: tuple[Epoch, ...],
    ranks: ReportedRankBitmaps,
) -> NodeRankState:
    """The place after this report."""
    return NodeRankState(
        pod=sender.pod,
        node=sender.node,
        sidecar=replace(report, ranks=(), epochs=(), restores=(), goodput=None),
        epochs=epochs,
        ranks=ranks,
        reported_at=at,
        stays=sender.local_stays,
    )


def is_only_of_copies(report: ReportedRanks) -> bool:
    """Whether a pod reports these ranks only because it keeps copies of them, or saw them archived.

    A rank of the pod's own that has no image here yet looks the same; it counts as its own once its
    trainer comes.
    """
    return bool(report.shards()) and not (report.alive or report.shards(*IN_POD))


@functools.lru_cache(maxsize=256)
def _shared(worlds: frozenset[tuple[bool, int]]) -> frozenset[tuple[bool, int]]:
    """One object for all places that report the same."""
    return worlds
