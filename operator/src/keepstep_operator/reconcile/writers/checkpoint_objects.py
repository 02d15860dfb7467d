"""Which Checkpoint objects a run should have: one for each step that is pinned or archived.

They are made of reports alone, so they come back after all objects were lost, as soon as a sidecar
of the run has looked at its volumes and its archive. Nothing is ever deleted because of them: an
object is a name for a step, not its owner. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.core.ledger import NEAREST_FIRST
from keepstep.steps import Answer, StepId, Tier
from keepstep_operator import names
from keepstep_operator.api.run import utc
from keepstep_operator.bodies import Body
from keepstep_operator.reconcile.state.previous_status import parse_steps
from keepstep_operator.reconcile.state.run import Run

MOST_ARCHIVED = 100
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "keepstep"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A step that is there whole. `tiers`: each of them holds all of it. `bytes`: of one copy, 0
    while that is not known."""

    run: str
    step: str
    ranks: int
    tiers: tuple[str, ...]
    bytes: int = 0

    @property
    def name(self) -> str:
        """Of the object: a DNS subdomain, since both parts are."""
        return f"{self.run}-{self.step}"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to write so that the objects are what they should be."""

    made: tuple[Kept, ...] = ()
    moved: tuple[Kept, ...] = ()
    gone: tuple[str, ...] = ()

    def first(self, count: int) -> Changes:
        """As many of them; whoever asks again gets the rest."""
        made = self.made[:count]
        moved = self.moved[: count - len(made)]
        return Changes(made=made, moved=moved, gone=self.gone[: count - len(made) - len(moved)])

    def __len__(self) -> int:
        return len(self.made) + len(self.moved) + len(self.gone)


def kept(run: Run) -> tuple[Kept, ...]:
    """The steps that deserve an object, newest first; the newest of the archive, and all pins."""
    archived = run.ledger.archived()[-MOST_ARCHIVED:]
    pins = set(parse_steps(run.object.pins)) if run.object else set()
    there = set(run.ledger.core.committed(Tier.LOCAL))
    found = sorted({*archived, *(pins & there)}, reverse=True)
    return tuple(_kept(run, id) for id in found)


def is_certain(run: Run) -> bool:
    """Whether a step that nobody tells of is not there: all who could hold it have answered."""
    if run.policy is None or not run.ledger.settled:
        return False
    if run.policy.archive is None:
        return True
    ranks = (one for place in run.ledger.there() for one in place.ranks.values())
    said = {one.archive_answer for one in ranks}
    return Answer.UNKNOWN not in said and bool(said - {None})


def changes(run: Run, known: Mapping[str, Body]) -> Changes:
    """`known`: our objects of the run as they are, by name."""
    wanted = {one.name: one for one in kept(run)}
    certain = is_certain(run)
    return Changes(
        made=tuple(one for name, one in wanted.items() if name not in known),
        moved=tuple(
            one
            for name, one in wanted.items()
            if name in known and certain and _tiers(known[name]) != list(one.tiers)
        ),
        gone=tuple(sorted(known.keys() - wanted.keys())) if certain else (),
    )


def body_of(one: Kept, *, namespace: str, owner_uid: str) -> Body:
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


def status_of(one: Kept, before: Body, *, at: float) -> Body:
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


def _kept(run: Run, id: StepId) -> Kept:
    ledger = run.ledger.core
    holders = {tier: len(ledger.holders(id, tier)) for tier in NEAREST_FIRST}
    del holders[Tier.MEMORY]
    world = max(holders.values())
    tiers = tuple(str(tier) for tier, count in holders.items() if count >= world)
    return Kept(
        run=run.key.name,
        step=str(id),
        ranks=max(1, world),
        tiers=tiers,
        bytes=ledger.size_bytes(id),
    )


def _tiers(body: Body) -> list[str]:
    return list((body.get("status") or {}).get("tiers") or [])
