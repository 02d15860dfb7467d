"""Which Checkpoint objects a run should have: one for each step that is pinned or archived.

They are made of reports alone, so they come back after all objects were lost, as soon as a sidecar
of the run has looked at its volumes and its archive. Nothing is ever deleted because of them: an
object is a name for a step, not its owner. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep_operator import names
from keepstep_operator.api.run import utc
from keepstep_operator.bodies import Body
from keepstep_operator.reconcile.state.run_view import KeptStep

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "keepstep"


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


def changes(kept: Iterable[KeptStep], known: Mapping[str, Body], *, certain: bool) -> Changes:
    """`known`: our objects of the run as they are, by name. `certain`: what is not kept is gone."""
    wanted = {one.name: one for one in kept}
    return Changes(
        made=tuple(one for name, one in wanted.items() if name not in known),
        moved=tuple(
            one
            for name, one in wanted.items()
            if name in known and certain and _tiers(known[name]) != list(one.tiers)
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


def status_of(one: KeptStep, before: Body, *, at: float) -> Body:
    """Its status; `before` has the object that is there, for the time of the condition."""
    known: Iterable[dict[str, Any]] = (before.get("status") or {}).get("conditions") or ()
    since = next((each.get("lastTransitionTime") for each in known), None)
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


def _tiers(body: Body) -> list[str]:
    return list((body.get("status") or {}).get("tiers") or [])
