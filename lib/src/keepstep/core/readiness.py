"""When a rank may vote: what its sidecar waits to hear first, for how long, and why.

A vote that comes too early begins anew, or goes on from an old step, although another pod or the
archive has a newer one. One that waits for ever stops the training. So every wait has a deadline
here, and nowhere else. Pure: the caller asks again when something has changed, or at `Wait.until`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEVER = math.inf
"""The time of what has not happened yet."""

FIRST_ANSWER_S = 3.0
"""For the operator's first answer; without one, the newest step wins."""

HELD_S = 5.0
"""A rank that holds something in its pod waits so long to hear whether there is something newer."""

START_S = 300.0
"""Trainers of one run begin that far apart: some load data first, or compile."""

NEWER_S = 60.0
"""A rank that holds nothing here, but knows of something elsewhere, waits so long for the operator
to name the pods that may hold something newer; also where no operator answers."""

REACHABLE_S = 60.0
"""For shards that the operator is making reachable; then the vote says that it does not know, the
trainer fails with that reason, and its next start waits again."""

STALE_S = 5.0
"""A vote that begins now is worth another look at what was listed before that."""

LISTING_S = 20.0
"""Another look may take so long; what was listed before counts then."""

ANSWERS_S = 6.0
"""For tiers that do not answer: where all pods of a run begin at once, one is asked before it
serves. That long after the operator's last word, too."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What a sidecar knows when one of its ranks wants to vote.

    Times are those of the caller's clock, `NEVER` for what has not happened. `held`: the rank has
    an image in this pod. `heard_at`: of the operator, or that it does not answer; `operator`: it
    does answer. `told_at`: when it last said who the other pods are; `introduced`: those are all;
    `awaits`: what it is making reachable; `pods_unasked`: some were not asked yet since. `known`: a
    tier beyond this machine holds something; `unknown`: why it cannot be said of all of them.
    `uncertified`: this pod serves nobody, and gets its certificate only when others are named.
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
    """Not before `until`, unless something changes: `why`, for people. `ask`: the tiers beyond this
    machine are to be asked again meanwhile."""

    until: float
    why: str
    ask: bool = False


def readiness(now: float, view: View, began: float) -> Ready | Wait:
    """Whether a vote that `began` then may be cast now."""
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
    """All that this vote waits for, each with its own deadline. `heard`: when it knew what this
    machine has, and what the operator says."""
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
