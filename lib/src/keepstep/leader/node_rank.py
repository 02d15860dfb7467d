"""A node rank of a run: the pod that holds it, and what its sidecar reported last.

Only the ledger knows where images lie; this module has the rest of each report. Ranks are bits of
an integer, as in the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from keepstep.core.commit_rule import RankUnion
from keepstep.steps import IN_POD, Answer, Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank


class RankState(NamedTuple):
    """What was reported of one rank besides its images. `own`: it trains, or trained, in this pod.
    Otherwise the pod only keeps copies of it (`copied`), or saw it archived."""

    world: int
    alive: bool
    own: bool
    copied: bool
    staged: StepId | None
    skipped: int
    discarded: int
    blocked_s: float
    archive_answer: Answer | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One node rank: the pod that holds it, and what its sidecar reported last. Fields that are
    needed with each report are computed once, since a run may have thousands of ranks.

    `own`: the ranks that train, or trained, here, without those of which it only keeps or reports
    copies. `copied`: the ranks of other pods of which it keeps copies. `archive_told`: the ranks of
    its own of which it reported what is archived. `alive`: the ranks whose trainer is running.
    `worlds`: for all its ranks, whether the trainer is running and which world it reported.
    `staged`: for each newest staged step, the ranks that staged it.

    `sidecar`: the last report, without what is in the ledger or above. `heard_at`: when it came, by
    the leader's clock. `gone`: the pod is gone. `dropped`: its images are removed from the ledger,
    too. `stays`: its volumes outlive it, on its node.
    """

    pod: str
    node: str
    sidecar: Report
    epochs: tuple[Epoch, ...]
    ranks: Mapping[int, RankState]
    heard_at: float
    gone: bool = False
    dropped: bool = False
    stays: bool = False
    own: int = field(init=False)
    copied: int = field(init=False)
    archive_told: int = field(init=False)
    alive: int = field(init=False)
    worlds: frozenset[tuple[bool, int]] = field(init=False)
    staged: tuple[tuple[StepId, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        own = copied = archive_told = alive = 0
        worlds, staged = set[tuple[bool, int]](), dict[StepId, int]()
        for rank, one in self.ranks.items():
            bit = 1 << rank
            own |= bit if one.own else 0
            copied |= bit if one.copied else 0
            archive_told |= bit if one.own and one.archive_answer is not None else 0
            alive |= bit if one.alive else 0
            worlds.add((one.alive, one.world))
            if one.staged is not None:
                staged[one.staged] = staged.get(one.staged, 0) | bit
        found = {
            "own": own,
            "copied": copied,
            "archive_told": archive_told,
            "alive": alive,
            "worlds": _shared(frozenset(worlds)),
            "staged": tuple(staged.items()),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def settled(self) -> bool:
        """Whether a step that this place does not report is certainly not there."""
        return not self.gone and self.sidecar.ready


class Places(Mapping[int, Place]):
    """All places of a run by node rank, and sums over those whose pods exist. The sums are kept up
    to date, since each report changes one place of thousands. `moved` grows when the pod, node or
    peer address of a place changes."""

    def __init__(self) -> None:
        self._of: dict[int, Place] = {}
        self.moved = 0
        self.own, self.alive = RankUnion(), RankUnion()
        self._unsettled: set[int] = set()
        self._worlds: Counter[frozenset[tuple[bool, int]]] = Counter()
        self._staged: dict[StepId, RankUnion] = {}

    def __getitem__(self, node_rank: int) -> Place:
        return self._of[node_rank]

    def __setitem__(self, node_rank: int, now: Place) -> None:
        before = self._of.get(node_rank)
        self._of[node_rank] = now
        was, place = _there(before), _there(now)
        if _found(before) != _found(now):
            self.moved += 1
        self.own.put(node_rank, place.own if place else 0)
        self.alive.put(node_rank, place.alive if place else 0)
        unsettled = place is not None and not place.settled
        self._unsettled.add(node_rank) if unsettled else self._unsettled.discard(node_rank)
        self._count(was, -1)
        self._count(place, 1)
        self._stage(node_rank, was, place)

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def items(self) -> ItemsView[int, Place]:
        return self._of.items()

    def values(self) -> ValuesView[Place]:
        return self._of.values()

    def there(self) -> Iterator[Place]:
        return (place for place in self._of.values() if not place.gone)

    @property
    def settled(self) -> bool:
        """Whether a step that no place reports is certainly at none of them."""
        return not self._unsettled

    @property
    def worlds(self) -> set[tuple[bool, int]]:
        """As `Place.worlds`."""
        return set().union(*self._worlds)

    def staged(self, epoch: EpochId) -> dict[int, int]:
        """For each newest staged step of this epoch, the ranks that staged it, as a bitmap."""
        return {id.step: ranks.once for id, ranks in self._staged.items() if id.epoch == epoch}

    def _count(self, place: Place | None, by: int) -> None:
        if place is not None:
            self._worlds[place.worlds] += by
            if not self._worlds[place.worlds]:
                del self._worlds[place.worlds]

    def _stage(self, node_rank: int, was: Place | None, place: Place | None) -> None:
        now = dict(place.staged) if place is not None else {}
        left = dict.fromkeys(id for id, _ in was.staged if id not in now) if was is not None else {}
        for id, ranks in (*now.items(), *((id, 0) for id in left)):
            at = self._staged.setdefault(id, RankUnion())
            at.put(node_rank, ranks)
            if not at.once:
                del self._staged[id]


def _there(place: Place | None) -> Place | None:
    return None if place is None or place.gone else place


def _found(place: Place | None) -> tuple[object, ...]:
    """What other pods need to find it."""
    return () if place is None else (place.pod, place.node, place.gone, place.sidecar.peer_address)


@dataclass(frozen=True, kw_only=True)
class Sender:
    """The pod that a report came from. `local_stays`: its volumes outlive it, on its node."""

    pod: str
    node_rank: int
    node: str
    local_stays: bool


def overtaken(place: Place, sender: Sender, report: Report) -> bool:
    """Whether a newer report of the same sidecar is known already."""
    return _is_same(place, sender, report) and report.sequence < place.sidecar.sequence


def follows(place: Place, sender: Sender, report: Report) -> bool:
    """Whether the changes in this report apply to what is known."""
    return _is_same(place, sender, report) and report.since == place.sidecar.sequence


def _is_same(place: Place, sender: Sender, report: Report) -> bool:
    return (place.pod, place.sidecar.started_at) == (sender.pod, report.started_at)


def renewed(
    sender: Sender,
    report: Report,
    at: float,
    *,
    epochs: tuple[Epoch, ...],
    ranks: Mapping[int, RankState],
) -> Place:
    """The place after this report."""
    return Place(
        pod=sender.pod,
        node=sender.node,
        sidecar=replace(report, ranks=(), epochs=(), restores=(), goodput=None),
        epochs=epochs,
        ranks=ranks,
        heard_at=at,
        stays=sender.local_stays,
    )


def rank_state(one: ReportedRank, before: RankState | None, held: Mapping[Tier, int]) -> RankState:
    """The state of a rank after a report. `held`: by tier, the ranks of which the ledger has an
    image of this place."""
    answer = before.archive_answer if before is not None else None
    archived = answer is Answer.STEPS
    if (told := one.tiers.get(Tier.ARCHIVE)) is not None:
        answer = told.answer
        archived = bool(told.shards) if told.gone is None else answer is Answer.STEPS
    here = one.alive or any(held[tier] >> one.rank & 1 for tier in IN_POD)
    copied = bool(held[Tier.PEER] >> one.rank & 1)
    return RankState(
        world=one.world,
        alive=one.alive,
        own=here or not (copied or archived),
        copied=copied,
        staged=one.staged,
        skipped=one.skipped,
        discarded=one.discarded,
        blocked_s=one.blocked_s,
        archive_answer=answer,
    )


def kept(one: ReportedRank) -> bool:
    """Whether a pod reports this rank only because it keeps copies of it, or saw it archived.

    A rank of the pod's own that has no image here yet looks the same; it counts as its own once its
    trainer comes.
    """
    return bool(one.shards()) and not (one.alive or one.shards(*IN_POD))


@lru_cache(maxsize=256)
def _shared(worlds: frozenset[tuple[bool, int]]) -> frozenset[tuple[bool, int]]:
    """One object for all places that report the same."""
    return worlds
