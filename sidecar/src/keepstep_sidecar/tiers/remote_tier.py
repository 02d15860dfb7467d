"""One interface for everything beyond this machine: the drives of other pods, and an archive.

A tier lists shards, opens them, and has places to which its `Replicator` sends what is durable
here. When the tier is woken, and from time to time, it compares what this machine holds
(`RunFacts.local`) with what is there.

A tier makes no decisions: the ledger decides which steps are complete, which may be deleted and
which is restored. All its work waits on a network, so its methods are coroutines that can be
cancelled. A tier that is slow or unreachable never holds up a write to a local volume, let alone a
trainer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.core.shard import Shard
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.status import TierStatus as TierStatus
from keepstep_sidecar.tiers.replicator import CopyTarget, DueShards, Replicator
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.volume.run_tree import LocalShard


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShard(Shard):
    """A shard that a remote tier holds. `key`: where, for the remote tier's own use."""

    tier: Tier
    key: Any = field(default=None, repr=False)

    @classmethod
    def from_shard(cls, shard: Shard, *, tier: Tier, key: Any = None) -> RemoteShard:
        """The same shard, as held there."""
        return cls(**shard.base_fields, tier=tier, key=key)


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a remote tier holds of this run. `reason` explains `Answer.UNKNOWN`.

    `complete`: steps of which the remote tier itself knows that it holds all shards (an archive has
    a `step.json`). A remote tier without such knowledge leaves it empty.
    """

    answer: TierAnswer
    shards: tuple[RemoteShard, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    complete: frozenset[StepId] = frozenset()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LocalInventory:
    """What this machine's volumes hold that other tiers should have: no dead steps.

    `commits`: those of the steps that are committed.
    """

    shards: Mapping[StepId, Mapping[int, LocalShard]] = field(default_factory=dict)
    commits: frozenset[StepId] = frozenset()


async def _unrecorded(strangers: frozenset[EpochId]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a remote tier asks about the run, anew each time.

    `pinned`: steps that must not be deleted; None until the leader has named them. `commit`: the
    run's newest commit, as far as this machine was told. `outgrown`: the run has a commit of its
    own, so nothing of another run is asked for or offered. `changed`: to be called when there is
    something new to `scan` at. `operated`: an operator says who belongs to the run. `leads`: this
    machine leads the run. `life`: the epoch in which a trainer of this machine trains now.
    `strangers`: those of these epochs that another run of this name began; `meet`: put them on
    record.
    """

    operated: bool = False
    leads: bool = True
    local: Callable[[], LocalInventory] = LocalInventory
    pinned: Callable[[], Collection[StepId] | None] = frozenset
    commit: Callable[[], StepId | None] = lambda: None
    outgrown: Callable[[], bool] = lambda: False
    changed: Callable[[], None] = lambda: None
    life: Callable[[], Epoch | None] = lambda: None
    strangers: Callable[[Iterable[Epoch]], frozenset[EpochId]] = lambda epochs: frozenset()
    meet: Callable[[frozenset[EpochId]], Awaitable[None]] = _unrecorded


class RemoteTier:
    """What every remote tier can do: list (`scan`), open (`sources`), write and delete
    (`CopyTarget` of the replicator), say its `status`. Methods that only concern a pod's peers, an
    archive or a fork are in these packages.

    All errors are KeepstepErrors; StorageError when the tier cannot be reached or answers wrongly.
    """

    tier: Tier

    where: str = ""
    """A name for people; it never contains a credential."""

    warning: str = ""
    """What people should know of this tier besides what `status` says; '' for nothing."""

    def __init__(
        self,
        *,
        due: Callable[[], DueShards] = DueShards,
        places: Callable[[], Mapping[str, CopyTarget]] = dict,
        retry_s: tuple[float, float] = (0.5, 30.0),
    ) -> None:
        """As `Replicator`. Without `places` nothing is sent to this tier."""
        self.facts = RunFacts()
        self.replicator = Replicator(self.tier, due, places, retry_s=retry_s)

    def set_run_facts(self, facts: RunFacts) -> None:
        """Call this once, before anything else."""
        self.facts = facts

    async def scan(self) -> Inventory:
        """List everything that the tier holds of this run now. Never raises: a tier that cannot be
        reached answers UNKNOWN, with the reason."""
        raise NotImplementedError

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        """The places where the shard can be opened, nearest first."""
        raise NotImplementedError

    def may_hold(self, shard: RemoteShard) -> bool:
        """Whether the shard that was last seen may still be there, while the tier does not
        answer."""
        return True

    def exclude_source(self, source: ShardSource, step_id: StepId) -> None:
        """This source of step `step_id`, or of its base, gave wrong bytes."""

    def status(self) -> TierStatus:
        """The state of the tier and its transfers."""
        return self.replicator.status(self.where)

    def wake(self) -> None:
        """What this machine holds has changed: compare soon."""
        self.replicator.compare_soon()

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        """Wait until everything that should be there is. Returns False when the time is up first.

        `whole` False: wait only for what this sidecar itself must send, and stop when that fails.
        This is for the end of a pod, whose neighbours may have ended already.
        """
        return await self.replicator.drain(timeout_s=timeout_s, whole=whole)

    async def run(self) -> None:
        """Work until cancelled. May be called again after a failure."""
        await self.replicator.run()

    async def close(self) -> None:
        """Close sockets and end threads."""
