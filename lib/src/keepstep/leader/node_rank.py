"""A node rank of a run: the pod that holds it, and what its sidecar reported last.

Only the ledger knows where images lie; this module has the rest of each report. Ranks are bits of
an integer, as in the ledger.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from keepstep.core.commit_rule import RankUnion
from keepstep.steps import IN_POD, Answer, Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank, ReportedVolume
from keepstep.wire.status import TierProgress

MOST_PAST = 64
"""The most replaced sidecars of one pod whose late reports are recognized."""


class SidecarState(NamedTuple):
    """What a sidecar reports of itself and of its pod. `failed`: pairs of name and reason, for
    volumes that take no writes. `refusals`, `refused`: see `Report`."""

    version: str
    started_at: float
    sequence: int
    ready: bool
    library: str
    pinned: str
    peer_address: str
    failed: tuple[tuple[str, str], ...]
    fullest: float
    warnings: tuple[str, ...]
    tiers: dict[Tier, TierProgress]
    refusals: int
    refused: str

    @classmethod
    def of(cls, report: Report) -> SidecarState:
        return cls(
            version=sys.intern(report.sidecar),
            started_at=report.started_at,
            sequence=report.sequence,
            ready=report.ready,
            library=sys.intern(report.library),
            pinned=sys.intern(report.pinned),
            peer_address=report.peer_address,
            failed=tuple((one.name, one.failed) for one in report.volumes if one.failed),
            fullest=max(map(_used, report.volumes), default=0.0),
            warnings=report.warnings,
            tiers=report.tiers,
            refusals=report.refusals,
            refused=report.refused,
        )


def _used(volume: ReportedVolume) -> float:
    whole = volume.capacity_bytes or volume.used_bytes + volume.free_bytes
    return volume.used_bytes / whole if whole > 0 else 0.0


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

    `since`, `heard_at`: when this process of the sidecar reported first and last, by the
    reconciler's clock. `past`: start times of replaced sidecars of this pod. `gone`: the pod is
    gone. `dropped`: its images are removed from the ledger, too. `stays`: its volumes outlive it,
    on its node.
    """

    pod: str
    created_at: str
    node: str
    sidecar: SidecarState
    epochs: tuple[Epoch, ...]
    ranks: Mapping[int, RankState]
    since: float
    heard_at: float
    past: frozenset[float] = frozenset()
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
    """The pod that a report came from. `created_at`: as the API server wrote it, in a form that
    sorts. `local_stays`: its volumes outlive it, on its node."""

    pod: str
    node_rank: int
    node: str
    created_at: str
    local_stays: bool


def overtaken(place: Place, sender: Sender, report: Report) -> bool:
    """Whether a newer report of this place is known already. Of two pods that were created in the
    same second, one holds the place while it is there: they must not take turns."""
    if place.pod != sender.pod:
        holder = "" if place.gone else place.pod
        return (sender.created_at, sender.pod) < (place.created_at, holder)
    if place.sidecar.started_at != report.started_at:
        return report.started_at in place.past
    return report.sequence < place.sidecar.sequence


def follows(place: Place, sender: Sender, report: Report) -> bool:
    """Whether the changes in this report apply to what is known."""
    return (
        place.pod == sender.pod
        and place.sidecar.started_at == report.started_at
        and place.sidecar.sequence == report.since
    )


def renewed(
    place: Place | None,
    sender: Sender,
    report: Report,
    at: float,
    *,
    epochs: tuple[Epoch, ...],
    ranks: Mapping[int, RankState],
) -> Place:
    """The place after this report. `place`: the place before it; None: the pod is new there."""
    past, since = (place.past, place.since) if place else (frozenset(), at)
    if place is not None and place.sidecar.started_at != report.started_at:
        newest = sorted({*past, place.sidecar.started_at})[-MOST_PAST:]
        past, since = frozenset(newest), at
    return Place(
        pod=sender.pod,
        created_at=sender.created_at,
        node=sender.node,
        sidecar=SidecarState.of(report),
        epochs=epochs,
        ranks=ranks,
        since=since,
        heard_at=at,
        past=past,
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


NEWEST_EPOCHS = 64


def epochs_needed(report: Report, *, most: int) -> tuple[Epoch, ...]:
    """The epochs of a report, without those that no step, no restore and no later epoch names.
    Those decide nothing, and a run that begins again each minute has thousands of them.

    The newest 64 epochs always stay. If more than `most` remain, the oldest are dropped, and their
    steps are then left alone.
    """
    if len(report.epochs) <= NEWEST_EPOCHS:
        return report.epochs
    recorded = {epoch.id: epoch for epoch in report.epochs}
    named = {held.step_id.epoch for one in report.ranks for held in one.shards()}
    named |= {one.epoch.id for one in report.restores}
    newest = sorted(recorded, reverse=True)
    pending = [*newest[:NEWEST_EPOCHS], *(named & recorded.keys())]
    needed: set[EpochId] = set()
    while pending:
        id = pending.pop()
        if id in needed or id not in recorded:
            continue
        needed.add(id)
        if (parent := recorded[id].parent) is not None:
            pending.append(parent.epoch)
    return tuple(recorded[id] for id in sorted(needed)[-most:])
