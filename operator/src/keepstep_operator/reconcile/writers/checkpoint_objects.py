"""Which Checkpoint objects a run should have: one for each step that is pinned or archived.

They are made of reports alone, so they come back after all objects were lost, as soon as a sidecar
of the run has looked at its volumes and its archive. Nothing is ever deleted because of them: an
object is a name for a step, not its owner. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from keepstep_operator import names
from keepstep_operator.api.run import utc
from keepstep_operator.bodies import Body
from keepstep_operator.reconcile.state.run_view import KeptStep

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "keepstep"


class Seen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is remembered of an object that is there: a run may have hundreds. `since`: when its
    condition last changed, '' where it has none."""

    uid: str = ""
    tiers: tuple[str, ...] = ()
    since: str = ""


def seen(body: Body) -> Seen:
    """Of an object as the API server has it."""
    status = body.get("status") or {}
    times = (one.get("lastTransitionTime") for one in status.get("conditions") or ())
    return Seen(
        uid=str((body.get("metadata") or {}).get("uid") or ""),
        tiers=_tiers(*map(str, status.get("tiers") or ())),
        since=sys.intern(str(next(times, None) or "")),
    )


@lru_cache(maxsize=64)
def _tiers(*told: str) -> tuple[str, ...]:
    """The same ones as one object."""
    return told


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to write so that the objects are what they should be."""

    made: tuple[KeptStep, ...] = ()
    moved: tuple[KeptStep, ...] = ()
    gone: tuple[str, ...] = ()

    def first(self, count: int) -> Changes:
        """As many of them; whoever asks again gets the rest."""
        made = self.made[:count]
        moved = self.moved[: count - len(made)]
        return Changes(made=made, moved=moved, gone=self.gone[: count - len(made) - len(moved)])

    def __len__(self) -> int:
        return len(self.made) + len(self.moved) + len(self.gone)


def changes(kept: Iterable[KeptStep], known: Mapping[str, Seen], *, certain: bool) -> Changes:
    """`known`: our objects of the run as they are, by name. `certain`: what is not kept is gone."""
    wanted = {one.name: one for one in kept}
    return Changes(
        made=tuple(one for name, one in wanted.items() if name not in known),
        moved=tuple(
            one
            for name, one in wanted.items()
            if name in known and certain and known[name].tiers != tuple(one.tiers)
        ),
        gone=tuple(sorted(known.keys() - wanted.keys())) if certain else (),
    )


def body_of(one: KeptStep, *, namespace: str, owner_uid: str) -> Body:
    """The object, as it is made; it goes with its CheckpointRun, of which `owner_uid` is."""
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": "CheckpointRun",
        "name": one.run,
        "uid": owner_uid,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": "Checkpoint",
        "metadata": {
            "name": one.name,
            "namespace": namespace,
            "labels": {names.RUN_KEY_LABEL: one.run, MANAGED_BY: MANAGER},
            "ownerReferences": [owner],
        },
        "spec": {
            "run": one.run,
            "step": one.step,
            "ranks": one.ranks,
            **({"bytes": one.bytes} if one.bytes else {}),
        },
    }


def status_of(one: KeptStep, *, since: str, at: float) -> Body:
    """Its status; `since`: the time of the condition, '' for one that it did not have."""
    return {
        "tiers": list(one.tiers),
        "conditions": [
            {
                "type": "Available",
                "status": "True",
                "reason": "Held",
                "message": f"all {one.ranks} shards are on: {', '.join(one.tiers)}",
                "lastTransitionTime": since or utc(at),
            }
        ],
    }
