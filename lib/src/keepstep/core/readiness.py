"""When a rank may vote: what its sidecar waits to hear first, for how long, and why.

If a rank votes too early, the run begins at step 0 or goes on from an old step, although another
pod or the archive has a newer one. If it waits for ever, the training stops. So every wait has a
deadline, except the wait for the scan of the volumes. All deadlines are defined here. Pure: the
caller asks again when something has changed, or at `Wait.until`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEVER = math.inf
"""The time of an event that has not happened yet."""

FIRST_ANSWER_S = 3.0
"""How long to wait for the operator's first answer. Without one, the newest step wins."""

HELD_S = 5.0
"""How long a rank that has an image in its pod waits to hear whether there is a newer one."""

START_S = 300.0
"""Trainers of one run begin up to this far apart, because some load data or compile first."""

NEWER_S = 60.0
"""How long a rank waits that has no image in its pod, but knows of images elsewhere: for the
operator to name the pods that may hold something newer. It waits as long if no operator answers."""

REACHABLE_S = 60.0
"""How long to wait for shards that the operator is making reachable. After that the vote says
UNKNOWN, the trainer fails with that reason, and its next start waits again."""

STALE_S = 5.0
"""A listing that is older than this when a vote begins is made again."""

LISTING_S = 20.0
"""How long to wait for the new listing. After that the old listing counts."""

ANSWERS_S = 6.0
"""How long to wait for tiers that do not answer, also counted from the operator's last word. When
all pods of a run begin at once, a pod may be asked before it serves."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What a sidecar knows when one of its ranks wants to vote.

    Times are of the caller's clock, `NEVER` for an event that has not happened.

    `scanned_at`: when the scan of the volumes ended. `held`: the rank has an image in this pod.
    `heard_at`: when the operator answered, or when it became clear that it does not. `operator`: it
    does answer. `told_at`: when the operator last named the other pods. `introduced`: it has named
    all of them. `awaits`: the shards that it is making reachable, as text. `pods_unasked`: some
    pods were not asked since they were named.

    `tiers`: there are tiers beyond this machine. `listed_at`: when they were last listed. `known`:
    such a tier holds something. `unknown`: why some of them could not say what they hold.
    `uncertified`: this pod serves no other pod, and gets its certificate only when other pods are
    named.
    """

    scanned_at: float
    heard_at: float
    tiers: bool = False
    listed_at: float = NEVER
    held: bool = False
    operator: bool = False
    told_at: float = -NEVER
    introduced: bool = True
    awaits: str = ""
    pods_unasked: bool = False
    known: bool = False
    unknown: str = ""
    uncertified: bool = False


@dataclass(frozen=True)
class Ready:
    """The rank may vote."""


@dataclass(frozen=True)
class Wait:
    """The rank may not vote before `until`, unless something changes.

    `why`: the reason, for people. `ask`: meanwhile, the caller must ask the tiers beyond this
    machine again.
    """

    until: float
    why: str
    ask: bool = False


def readiness(now: float, view: View, began: float) -> Ready | Wait:
    """Whether a vote that began at `began` may be cast now."""
    if view.scanned_at == NEVER:
        return Wait(NEVER, "the volumes are still being scanned")
    scanned = max(began, view.scanned_at)
    heard = max(scanned, min(view.heard_at, scanned + FIRST_ANSWER_S))
    if view.heard_at == NEVER and now < heard:
        return Wait(heard, "the operator has not answered yet")
    if not view.tiers:
        return Ready()
    return next((wait for wait in _waits(view, heard) if now < wait.until), Ready())


def _waits(view: View, heard: float) -> list[Wait]:
    """Everything that this vote waits for, each with its own deadline. `heard`: when it was known
    what this machine has and what the operator says."""
    told, latest = max(heard, view.told_at), heard + START_S
    searching = not view.held and not view.known
    waits: list[Wait] = []
    if view.listed_at == NEVER or view.pods_unasked:
        whom = "pods that were just named" if view.pods_unasked else "peers and archive"
        until = heard + HELD_S if view.held else latest
        waits.append(Wait(until, f"{whom} have not said yet what they hold"))
    if view.awaits:
        waits.append(Wait(min(told + REACHABLE_S, latest), view.awaits))
    if not view.held and view.listed_at < heard - STALE_S:
        waits.append(Wait(heard + LISTING_S, "peers and archive are asked again", ask=True))
    if not view.held and not view.introduced:
        until = latest if searching and view.operator else heard + NEWER_S
        why = "the operator has not heard of all pods of the run yet"
        waits.append(Wait(until, why, ask=searching and bool(view.unknown)))
    if view.unknown and (searching or view.uncertified):
        waits.append(Wait(min(told + ANSWERS_S, latest), view.unknown, ask=True))
    return waits
