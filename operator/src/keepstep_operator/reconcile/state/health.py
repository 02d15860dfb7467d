"""Problems of a run that only time shows: silent sidecars, missing trainers, stalled commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep_operator.api.run import cut, utc

if TYPE_CHECKING:
    from keepstep_operator.reconcile.state.run import Run

SILENT_S = 90.0
"""A sidecar is silent after this time: three missed reports, as it reports at least every 30 s."""
LIBRARY_S = 60.0
"""From the start of a training container until its trainer must have come to the sidecar."""
FIRST_COMMIT_S = 600.0
SLOWEST_COMMIT_S = 120.0
INTERVALS = 5.0
"""Commits are stalled after this many times the interval between the last two."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """`silent`, `without_library`: names of pods. `stalled`: why no step becomes committed; ''
    while all is well. `draining`: cordoned nodes that hold the only copy of some part of the newest
    commit. `absent_ranks`: how many ranks the trainers speak of that no sidecar has."""

    silent: frozenset[str] = frozenset()
    without_library: frozenset[str] = frozenset()
    stalled: str = ""
    draining: frozenset[str] = frozenset()
    absent_ranks: int = 0


def look(run: Run, *, at: float) -> Health:
    """The health of the run now. The status is written when it changes."""
    return Health(
        silent=frozenset(_silent(run, at)),
        without_library=frozenset(_without_library(run, at)),
        stalled=_failed_volume(run) or _stalled(run, at),
        draining=frozenset(_draining(run)),
        absent_ranks=_absent_ranks(run, at),
    )


def _absent_ranks(run: Run, at: float) -> int:
    """The ranks without a sidecar, once all known pods have trained for a while: then no pod is
    just late. Their pods do not ask for keepstep, so they are not known."""
    pods = [pod for pod in run.pods.values() if not pod.over]
    since = [run.training_since.get(pod.uid, at) for pod in pods if pod.stays]
    if len(since) < len(pods) or not pods or at - max(since) < LIBRARY_S:
        return 0
    known = 0
    for place in run.ledger.places.values():
        known |= place.own
    return max(0, (run.ledger.world or 0) - known.bit_count())


def _draining(run: Run) -> set[str]:
    if run.finished_at is not None:
        return set()
    cordoned = {
        place.node
        for place in run.ledger.places.values()
        if (node := run.nodes.get(place.node)) is not None and node.cordoned
    }
    return cordoned & run.ledger.safety().sole if cordoned else set()


def _silent(run: Run, at: float) -> set[str]:
    """Training pods whose sidecar has not reported for `SILENT_S`."""
    heard = {place.pod: place.heard_at for place in run.ledger.places.values()}
    return {
        run.pods[uid].name
        for uid, since in run.training_since.items()
        if run.pods[uid].injected and at - max(since, heard.get(uid, since)) >= SILENT_S
    }


def _without_library(run: Run, at: float) -> set[str]:
    """Training pods whose sidecar knows of no trainer. A restarted sidecar gets time to hear of
    it."""
    places = {place.pod: place for place in run.ledger.places.values()}
    return {
        run.pods[uid].name
        for uid, since in run.training_since.items()
        if (place := places.get(uid)) is not None
        and not place.sidecar.library
        and at - max(since, place.since) >= LIBRARY_S
    }


def _failed_volume(run: Run) -> str:
    for place in run.ledger.places.values():
        pod = run.pods.get(place.pod)
        for volume, why in place.sidecar.failed:
            if pod is not None:
                reason, name = cut(why, longest=200), cut(volume, longest=64)
                return (
                    f"volume {name} of pod {pod.name} on node {pod.node} takes no writes"
                    f" ({reason}): free space on it or replace the drive, then delete the pod"
                )
    return ""


def _stalled(run: Run, at: float) -> str:
    if run.finished_at is not None or run.alive_since is None:
        return ""
    since, patience_s = _patience(run)
    if since is None or not run.behind or at - since < patience_s or not _overdue(run):
        return ""
    return f"no step became committed since {utc(since)} although steps are staged"


def _patience(run: Run) -> tuple[float | None, float]:
    """Since when a commit is due, and how long to wait for it. Time without trainers does not
    count."""
    if run.commit is None or run.alive_since is None:
        return run.alive_since, FIRST_COMMIT_S
    since = max(run.commit.at, run.alive_since)
    if run.commit.interval_s is None:
        return since, FIRST_COMMIT_S
    return since, max(SLOWEST_COMMIT_S, INTERVALS * run.commit.interval_s)


def _overdue(run: Run) -> bool:
    """Whether the commit is overdue in steps, too: if the policy fixes the number of steps between
    two commits, time alone says nothing."""
    every = run.policy.persist_every if run.policy else None
    return every is None or (run.behind or 0) > 2 * every
