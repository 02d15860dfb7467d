"""Which Checkpoint objects a run should have: one for each pinned or archived step.

They are made from reports alone. So if all objects are lost, they are made again as soon as a
sidecar of the run has looked at its volumes and its archive. Deleting an object deletes no data: it
is a name for a step, not its owner. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from keepstep_operator import names
from keepstep_operator.api.run import utc
from keepstep_operator.bodies import Body
from keepstep_operator.reconcile.state.run_view import KeptStep

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "keepstep"


class Seen(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """What is remembered of an existing object; it is little, since a run may have hundreds.
    `since`: when its condition last changed; '' if it has none."""

    uid: str = ""
    tiers: tuple[str, ...] = ()
    since: str = ""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, Seen]).decode


def seen(body: Body) -> Seen:
    """The same, from an object as the API server has it."""
    status = body.get("status") or {}
    times = (one.get("lastTransitionTime") for one in status.get("conditions") or ())
    return Seen(
        uid=str((body.get("metadata") or {}).get("uid") or ""),
        tiers=tuple(map(str, status.get("tiers") or ())),
        since=str(next(times, None) or ""),
    )


def pack(known: Mapping[str, Seen]) -> bytes:
    """A run's objects by name as bytes. They rest for most of the time, and would take ten times as
    much as objects."""
    return zlib.compress(_encode(known), 1)


def unpack(packed: bytes) -> dict[str, Seen]:
    """The inverse of `pack`."""
    return _decode(zlib.decompress(packed))


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to write so that the objects are as they should be. `made`, `moved`: to create, and to
    give another status. `gone`: names to delete."""

    made: tuple[KeptStep, ...] = ()
    moved: tuple[KeptStep, ...] = ()
    gone: tuple[str, ...] = ()

    def first(self, count: int) -> Changes:
        """The first `count` changes. The next comparison finds the rest."""
        made = self.made[:count]
        moved = self.moved[: count - len(made)]
        return Changes(made=made, moved=moved, gone=self.gone[: count - len(made) - len(moved)])

    def __len__(self) -> int:
        return len(self.made) + len(self.moved) + len(self.gone)


def changes(kept: Iterable[KeptStep], known: Mapping[str, Seen], *, certain: bool) -> Changes:
    """The changes that are due. `known`: the run's present objects that are ours, by name.
    `certain`: steps that are not in `kept` do not exist."""
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
    """The object to create. It is deleted with its CheckpointRun, whose uid is `owner_uid`."""
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
    """The object's status. `since`: when the condition last changed; '' if the object had none."""
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
