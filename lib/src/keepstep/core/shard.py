"""The value that ledger, inventory, listings and records all speak of: a shard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from keepstep.core.ranks import NOBODY, Ranks
from keepstep.steps import StepId


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One sealed image of one rank, wherever it lies.

    `root`: digest over its digests, None in memory; `params_digest`: of its section `params`; both
    hex. `written_at`: unix seconds, by its own control page. `alike`: the rank and its twins, all
    of whose images hold the very same boxes, so that one is enough to restore them all; nobody
    where it has none. `size_bytes`: of the whole image, 0 where nobody said; it makes no other
    image.
    """

    step_id: StepId
    rank: int
    world: int
    size_bytes: int = field(default=0, compare=False)
    root: str | None = None
    params_digest: str | None = None
    alike: Ranks = NOBODY
    written_at: float | None = None


class Told(Protocol):
    """What the ledger asks of a shard, which it is told of under a rank: a `Shard`, or a row of a
    report."""

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
        """The rank itself may be missing: an older one told of its twins alone."""

    @property
    def written_at(self) -> float | None: ...
