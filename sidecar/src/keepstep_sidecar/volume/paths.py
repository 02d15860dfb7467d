"""The directory of a run on one volume: what each name means. Pure: touches no files.

    <root>/                                     <dir>/<run>
        .lock                                   held by the sidecar that owns the volume
        run.json                                the run's epochs
        history.jsonl                           what happened, shown to people
        <step>/rank-00000-of-00002.safetensors  a committed step: whole, visible to stock readers
        pending/<step>/rank-...                 durable shards of steps not known to be committed
        pending/<step>/.rank-....tmp-<pid>-<n>  a shard being written
        quarantine/<step>.<shard>.<reason>.<n>  files that failed; kept, never read again
        retired/<step>.<n>/                     a step that is being deleted
        spare/rank-...                          retired shards that will be written over

A shard moves between these places by rename only, so it is always in exactly one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.shard import MOST_RANKS
from keepstep.steps import StepId, shard_name

LOCK = ".lock"
RECORD = "run.json"
HISTORY = "history.jsonl"

_NUMBER = r"([0-9]{5}|[1-9][0-9]{5,9})"
_SHARD = re.compile(rf"rank-{_NUMBER}-of-{_NUMBER}\.safetensors")
_TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9]+-[0-9]+")


@dataclass(frozen=True, kw_only=True)
class ShardName:
    """What a shard's path says; the control page inside must say the same. Raises ValueError for
    ranks that no world has: what is held of a step is one bit for each."""

    id: StepId
    rank: int
    world: int

    def __post_init__(self) -> None:
        if not self.rank < self.world <= MOST_RANKS:
            raise ValueError(f"rank {self.rank} of {self.world}: a world has {MOST_RANKS} at most")

    @classmethod
    def parse(cls, path: Path) -> ShardName:
        """Read `.../<step>/rank-00000-of-00002.safetensors`. Raises ValueError."""
        if not (match := _SHARD.fullmatch(path.name)):
            raise ValueError(f"not a shard's name: {path.name}")
        return cls(id=StepId.parse(path.parent.name), rank=int(match[1]), world=int(match[2]))


@dataclass(frozen=True)
class Tree:
    """Paths below `root`, which is absolute."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / LOCK

    @property
    def record(self) -> Path:
        return self.root / RECORD

    @property
    def history(self) -> Path:
        return self.root / HISTORY

    @property
    def pending(self) -> Path:
        return self.root / "pending"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def retired(self) -> Path:
        return self.root / "retired"

    @property
    def spare(self) -> Path:
        return self.root / "spare"

    def pending_step(self, id: StepId) -> Path:
        return self.pending / str(id)

    def published_step(self, id: StepId) -> Path:
        return self.root / str(id)

    def pending_shard(self, id: StepId, rank: int, world: int) -> Path:
        return self.pending_step(id) / shard_name(rank, world)

    def is_published(self, path: Path) -> bool:
        """Does `path` lie in a directory that readers see?"""
        return path.parent.parent == self.root and is_step(path.parent.name)


def temporary_name(shard: str, *, pid: int, number: int) -> str:
    """A name that readers of `*.safetensors` do not see, and that a scan tells from a shard."""
    return f".{shard}.tmp-{pid}-{number}"


def is_temporary(name: str) -> bool:
    """Is this a name that `temporary_name` makes?"""
    return _TEMPORARY.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Is this the name of a shard? Other files in a step's directory are not ours."""
    return _SHARD.fullmatch(name) is not None


def is_step(name: str) -> bool:
    """Is this the name of a step's directory?"""
    try:
        StepId.parse(name)
    except ValueError:
        return False
    return True


def quarantine_name(path: Path, reason: str, number: int) -> str:
    """`<step>.<shard>.<reason>.<n>`. Unlike a shard's name, it does not end in .safetensors."""
    match = _TEMPORARY.fullmatch(path.name)
    shard = (match[1] if match else path.name).removesuffix(".safetensors")
    slug = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:40] or "unknown"
    return f"{path.parent.name}.{shard}.{slug}.{number}"
