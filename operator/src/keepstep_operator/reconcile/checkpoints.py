"""Which Checkpoint objects a run should have: one for each pinned or archived step. Pure.

They are made from the leader's report alone. So if all objects are lost, they are made again.
Deleting an object deletes no data: it is a name for a step, not its owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from keepstep.wire.run_reports import KeptStep, format_utc
from keepstep_operator import names
from keepstep_operator.object_body import Body
from keepstep_operator.reconcile.run_transitions import Run

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "keepstep"

Tiers = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ObjectChanges:
    """What to write so that the objects are as they should be. `made`, `moved`: to create, and to
    give another status. `gone`: names to delete."""

    made: tuple[KeptStep, ...] = ()
    moved: tuple[KeptStep, ...] = ()
    gone: tuple[str, ...] = ()


def due_changes(run: Run, known: Mapping[str, Tiers]) -> ObjectChanges:
    """The changes that are due. `known`: by name, the tiers of the present objects that are ours.
    A step that is not reported counts as gone only if the leader is certain."""
    report = run.report
    if report is None:
        return ObjectChanges()
    target = {checkpoint_name(run, checkpoint): checkpoint for checkpoint in report.kept}
    return ObjectChanges(
        made=tuple(checkpoint for name, checkpoint in target.items() if name not in known),
        moved=tuple(
            checkpoint
            for name, checkpoint in target.items()
            if name in known and report.certain and known[name] != tiers_of(checkpoint)
        ),
        gone=tuple(sorted(known.keys() - target.keys())) if report.certain else (),
    )


def checkpoint_name(run: Run, checkpoint: KeptStep) -> str:
    """The name of its object. It is a DNS subdomain, since both parts are."""
    return f"{run.key.name}-{checkpoint.step}"


def tiers_of(checkpoint: KeptStep) -> Tiers:
    return tuple(map(str, checkpoint.tiers))


def parse_tiers(body: Body) -> Tiers:
    """The same, from an object as the API server has it."""
    return tuple(map(str, (body.get("status") or {}).get("tiers") or ()))


def body_of(run: Run, checkpoint: KeptStep) -> Body:
    """The object to create. It is deleted with its CheckpointRun."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "Checkpoint",
        "metadata": {
            "name": checkpoint_name(run, checkpoint),
            "namespace": run.key.namespace,
            "labels": {names.RUN_KEY_LABEL: run.key.name, MANAGED_BY: MANAGER},
            "ownerReferences": [owner_of(run)],
        },
        "spec": {
            "run": run.key.name,
            "step": checkpoint.step,
            "ranks": max(1, checkpoint.ranks),
            **({"bytes": checkpoint.size_bytes} if checkpoint.size_bytes else {}),
        },
    }


def owner_of(run: Run) -> Body:
    """The CheckpointRun as the owner of an object."""
    uid = run.object.uid if run.object is not None else ""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "CheckpointRun",
        "name": run.key.name,
        "uid": uid,
    }


def status_of(checkpoint: KeptStep, *, now: float) -> Body:
    """The object's status. Its condition never changes while the object is there."""
    return {
        "tiers": list(tiers_of(checkpoint)),
        "conditions": [
            {
                "type": "Available",
                "status": "True",
                "reason": "Held",
                "message": (
                    f"all {checkpoint.ranks} shards are on: {', '.join(tiers_of(checkpoint))}"
                ),
                "lastTransitionTime": format_utc(now),
            }
        ],
    }
