"""A node rank of a run: the pod that holds it, and what its sidecar said last."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.wire.reports import Report, ReportedRank


@dataclass(kw_only=True)
class Place:
    """One node rank: the pod that holds it, and what its sidecar said last.

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

    @property
    def own(self) -> tuple[ReportedRank, ...]:
        """The ranks that train, or trained, here; not those of which it only tells what is kept."""
        return tuple(one for one in self.report.ranks if not kept(one))

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
