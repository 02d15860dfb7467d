"""One interface for everything beyond this machine: the drives of other pods, and an archive.

A tier takes shards that are durable here, and says where other shards can be read. It is not
notified of shards. When it is woken, and from time to time, it compares what this machine holds
(`RunFacts.local`) with what it lists itself, and sends what is missing. So a tier that was
unreachable, was restarted or has lost its store catches up in the same way, and a lost wake-up
costs only one period.

A tier makes no decisions: the ledger decides which steps are complete, which may be deleted and
which is restored. All its work waits on a network, so its methods are coroutines that can be
cancelled. A tier that is slow or unreachable never holds up a write to a local volume, let alone a
trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from keepstep.core.shard import Shard
from keepstep.steps import Answer, Epoch, StepId, Tier
from keepstep.wire.reports import Peer
from keepstep.wire.status import TierStatus as TierStatus
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.volume.scan import LocalShard


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShard(Shard):
    """A shard that a remote tier holds. `where`: a text for people, like `s3://ckpt/gpt` or `node
    rank 3`. `key`: for the remote tier's own use."""

    tier: Tier
    where: str
    key: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, shard: Shard, *, tier: Tier, where: str, key: Any = None) -> RemoteShard:
        """The same shard, as held at `where`."""
        told = {one.name: getattr(shard, one.name) for one in fields(Shard)}
        return cls(**told, tier=tier, where=where, key=key)


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a remote tier holds of this run. `reason` explains `Answer.UNKNOWN`.

    `complete`: steps of which the remote tier itself knows that it holds all shards (an archive has
    a `step.json`). A remote tier without such knowledge leaves it empty.
    """

    answer: Answer
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


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a remote tier asks about the run, anew each time.

    `pinned`: steps that must not be deleted; None until the operator has named them. `commit`: the
    run's newest commit, as far as this machine was told. `outgrown`: the run has a commit of its
    own, so nothing of another run is asked for or offered. `changed`: to be called when there is
    something new to `look` at. `managed`: an operator sees the whole run.
    """

    managed: bool = False
    local: Callable[[], LocalInventory] = LocalInventory
    pinned: Callable[[], Collection[StepId] | None] = frozenset
    commit: Callable[[], StepId | None] = lambda: None
    outgrown: Callable[[], bool] = lambda: False
    changed: Callable[[], None] = lambda: None


@dataclass(kw_only=True)
class Traffic:
    """What a remote tier has sent and fetched since the start, as in `TierStatus`."""

    sent: int = 0
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    received_bytes: int = 0
    received_seconds: float = 0.0
    failures: int = 0

    def count_sent(self, size_bytes: int, seconds: float) -> None:
        """Count one more shard that was sent there."""
        self.sent += 1
        self.sent_bytes += size_bytes
        self.sent_seconds += seconds

    def count_received(self, size_bytes: int, seconds: float) -> None:
        """Count bytes that came from there."""
        self.received_bytes += size_bytes
        self.received_seconds += seconds


class RemoteTier:
    """See the module. All errors are KeepstepErrors; StorageError when the tier cannot be reached
    or answers wrongly. Methods that do not concern a kind of remote tier do nothing there."""

    tier: Tier
    """`PEER` or `ARCHIVE`."""

    facts: RunFacts = RunFacts()
    ancestor: str = ""
    """The other run whose steps this tier holds. A run that has nothing of its own begins from one
    of these steps instead of at step 0, so only where step 0 would be allowed."""

    warning: str = ""
    """What people should know of this tier besides what `status` says; '' for nothing."""

    meets_pods: bool = False
    """Whether an operator tells this tier of the run's other pods."""

    def begin(self, facts: RunFacts) -> None:
        """Call this once, before anything else."""
        self.facts = facts

    # --- what is there -----------------------------------------------------------------------

    async def look(self) -> Inventory:
        """Everything that the tier holds of this run now. Never raises: a tier that cannot be
        reached answers UNKNOWN, with the reason."""
        raise NotImplementedError

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        """The places where the shard can be read, nearest first."""
        raise NotImplementedError

    def refuse(self, source: ShardSource) -> None:
        """This source gave wrong bytes. It is not named again."""

    @property
    def ids(self) -> frozenset[StepId]:
        """All steps of `ancestor` that were ever offered."""
        return frozenset()

    # --- what is sent there ------------------------------------------------------------------

    def wake(self) -> None:
        """What this machine holds has changed: compare soon."""

    def want(self, id: StepId) -> None:
        """Send this step although it is not due, because a client waits for it. Every pod of the
        run must be told, because each pod sends its own ranks' shards."""

    def had(self, id: StepId) -> bool:
        """Whether the whole step is there, or was until it expired."""
        return False

    def in_use(self, id: StepId) -> bool:
        """Whether a local shard of this step is being sent or is the next to be sent. The step must
        not be retired then."""
        return False

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        """Wait until everything that should be there is. Returns False when the time is up first.

        `whole` False: wait only for what this sidecar itself must send, and stop when that fails.
        This is for the end of a pod, whose neighbours may have ended already.
        """
        return True

    # --- other pods --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The `host:port` at which other pods reach this one; '' when this pod serves nothing."""
        return ""

    @property
    def introduced(self) -> bool:
        """Whether all other pods are known."""
        return True

    def peers_are(
        self, peers: tuple[Peer, ...], *, awaits: str = "", complete: bool = True
    ) -> None:
        """The run's other pods. A pod that is no longer named is no longer a peer. `awaits`: see
        `ReportReply`. `complete`: no other pod can hold anything."""

    def kept(self) -> Sequence[Shard]:
        """Complete copies that this pod keeps for other pods: `ReportedRank.peer` in a report."""
        return ()

    async def make_room(self, size_bytes: int) -> bool:
        """A volume is full: delete copies, oldest first, but never the newest committed copy of a
        rank. Returns False when there was nothing to delete."""
        return False

    # --- working -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled."""
        await asyncio.Event().wait()

    def status(self) -> TierStatus:
        """The state of the tier and its transfers."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close sockets and end threads."""
