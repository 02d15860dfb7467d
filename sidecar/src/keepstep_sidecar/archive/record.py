"""`step.json`: what makes the shards in a step's directory an archived step.

Written last, once, and sealed. It tells what the shards cannot tell together: that there are no
more, and the epochs of the run, so that a volume that is lost takes no lineage with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.digests import xxh3_128
from keepstep.errors import FormatError, TornError, VersionError
from keepstep.steps import Epoch, EpochId, StepId, shard_name
from keepstep_sidecar import __version__

FORMAT_VERSION = 1
NAME = "step.json"
LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of the step. Digests in hex; `params_digest` None without parameters."""

    rank: int
    name: str
    bytes: int
    root: str
    params_digest: str | None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """`shards` in the order of ranks, one for each rank of `world`. `written_at`: unix seconds."""

    run: str
    id: StepId
    world: int
    epochs: tuple[Epoch, ...]
    shards: tuple[Shard, ...]
    written_at: float
    keepstep: str = __version__

    def same_content(self, other: StepRecord) -> bool:
        """Do both stand for the very same bytes?"""
        return (self.run, self.id, self.world, self.shards) == (
            other.run,
            other.id,
            other.world,
            other.shards,
        )

    def to_json(self) -> bytes:
        body = {
            "format_version": FORMAT_VERSION,
            "keepstep": self.keepstep,
            "run": self.run,
            "step": str(self.id),
            "world": self.world,
            "written_at": self.written_at,
            "epochs": [
                {
                    "id": str(one.id),
                    "parent": None if one.parent is None else str(one.parent),
                    **({"origin": one.origin} if one.origin else {}),
                }
                for one in self.epochs
            ],
            "shards": [
                {
                    "rank": one.rank,
                    "name": one.name,
                    "bytes": one.bytes,
                    "root": one.root,
                    "params": one.params_digest,
                }
                for one in self.shards
            ],
        }
        return json.dumps({**body, "seal": _seal(body)}, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, *, path: str) -> StepRecord:
        """Inverse of `to_json`. Raises TornError, FormatError, VersionError naming `path`."""
        try:
            body = json.loads(data)
            seal = body.pop("seal")
            if int(body["format_version"]) > FORMAT_VERSION:
                raise VersionError("written by a newer keepstep; upgrade this one", path=path)
            if seal != _seal(body):
                raise TornError("its seal does not fit: it was changed or cut off", path=path)
            record = _parsed(body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"not the record of a step ({error})", path=path) from error
        record._check(path)
        return record

    def _check(self, path: str) -> None:
        names = [shard_name(rank, self.world) for rank in range(self.world)]
        listed = [(one.rank, one.name) for one in self.shards]
        if listed != list(enumerate(names)):
            raise FormatError(f"its shards are not those of {self.world} ranks", path=path)


def _seal(body: Mapping[str, Any]) -> str:
    return xxh3_128(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hex()


def _parsed(body: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        run=str(body["run"]),
        id=StepId.parse(body["step"]),
        world=int(body["world"]),
        epochs=tuple(map(_epoch, body["epochs"])),
        shards=tuple(map(_shard, body["shards"])),
        written_at=float(body["written_at"]),
        keepstep=str(body["keepstep"]),
    )


def _epoch(value: Any) -> Epoch:
    parent = value["parent"]
    return Epoch(
        EpochId.parse(value["id"]),
        None if parent is None else StepId.parse(parent),
        str(value.get("origin") or ""),
    )


def _shard(value: Any) -> Shard:
    return Shard(
        rank=int(value["rank"]),
        name=str(value["name"]),
        bytes=int(value["bytes"]),
        root=str(value["root"]),
        params_digest=None if value["params"] is None else str(value["params"]),
    )
