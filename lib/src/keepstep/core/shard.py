"""A shard: the value that ledger, inventory, listings and records share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from keepstep.core.ranks import NOBODY, Ranks
from keepstep.steps import StepId


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One sealed image of one rank, wherever it lies.

    `root`: the digest over its digests, in hex; None in memory. `params_digest`: the digest of its
    section `params`, in hex. `written_at`: unix seconds, from its own control page. `alike`: the
    rank and its twins, all of whose images hold the very same boxes, so that one image is enough to
    restore them all; no ranks if it has no twins. `size_bytes`: bytes of the whole image, 0 if
    unknown. Shards that differ only in `size_bytes` are equal.
    """

    step_id: StepId
    rank: int
    world: int
    size_bytes: int = field(default=0, compare=False)
    root: str | None = None
    params_digest: str | None = None
    alike: Ranks = NOBODY
    written_at: float | None = None


class ShardFacts(Protocol):
    """What the ledger needs to know of a shard of a given rank: a `Shard`, or a row of a report."""

    @property
    def step_id(self) -> StepId: ...
    @property
    def world(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def root(self) -> str | None: ...
    @property
    def params_digest(self) -> str | None: ...
    @property
    def alike(self) -> Ranks:
        """The rank and its twins, as in `Shard`."""

    @property
    def written_at(self) -> float | None: ...
