"""What lies beyond this machine: other pods' drives, an archive. One interface for all of it.

A tier takes shards that are durable here and says where others can be read. It is told of nothing:
it compares what this machine holds (`RunFacts.local`) with what it lists itself, when it is woken
and from time to time, and sends what is missing. So a tier that was away, was restarted or has lost
its store catches up in the same way, and a lost wake-up costs a period.

It decides nothing: what is complete, what may go and what is restored is the ledger's business.
Everything that it does waits on a network, so its methods are coroutines that can be cancelled, and
a tier that is slow or away never holds up a write to a local volume, let alone a trainer.
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
    """A shard that a remote tier holds. `where`: for people, like `s3://ckpt/gpt` or `node rank 3`.
    `key`: the remote tier's own."""

    tier: Tier
    where: str
    key: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, shard: Shard, *, tier: Tier, where: str, key: Any = None) -> RemoteShard:
        """The same shard, at that place."""
        told = {one.name: getattr(shard, one.name) for one in fields(Shard)}
        return cls(**told, tier=tier, where=where, key=key)


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a remote tier holds of this run. `reason` explains `Answer.UNKNOWN`.

    `complete`: steps of which the remote tier itself knows that all shards are there (an archive's
    `step.json`); a remote tier without such knowledge leaves it empty.
    """

    answer: Answer
    shards: tuple[RemoteShard, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    complete: frozenset[StepId] = frozenset()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LocalInventory:
    """What this machine's volumes hold that other tiers should have: no dead steps.

    `commits`: the committed ones of these steps.
    """

    shards: Mapping[StepId, Mapping[int, LocalShard]] = field(default_factory=dict)
    commits: frozenset[StepId] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a remote tier asks of the run, anew each time.

    `pinned`: steps that stay, None while nobody has said which. `commit`: the run's newest one, as
    far as this machine was told. `outgrown`: the run has a commit of its own, so nothing of another
    run is asked or offered. `changed`: to be called when there is something new to `look` at.
    `managed`: an operator sees the whole run.
    """

    managed: bool = False
    local: Callable[[], LocalInventory] = LocalInventory
    pinned: Callable[[], Collection[StepId] | None] = frozenset
    commit: Callable[[], StepId | None] = lambda: None
    outgrown: Callable[[], bool] = lambda: False
    changed: Callable[[], None] = lambda: None


@dataclass(kw_only=True)
class Traffic:
    """What a remote tier has sent and fetched since the start, as `TierStatus` tells it."""

    sent: int = 0
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    received_bytes: int = 0
    received_seconds: float = 0.0
    failures: int = 0

    def count_sent(self, size_bytes: int, seconds: float) -> None:
        """One shard more went there."""
        self.sent += 1
        self.sent_bytes += size_bytes
        self.sent_seconds += seconds

    def count_received(self, size_bytes: int, seconds: float) -> None:
        """These bytes came from there."""
        self.received_bytes += size_bytes
        self.received_seconds += seconds


class RemoteTier:
    """See the module. All errors are KeepstepErrors: StorageError when it cannot be reached or
    answers wrongly. What a kind of remote tier has no part in does nothing."""

    tier: Tier
    """`PEER` or `ARCHIVE`."""

    facts: RunFacts = RunFacts()
    ancestor: str = ""
    """Another run, whose steps these are: a run that has nothing of its own begins from one of them
    instead of at step 0, and so only where step 0 would be allowed."""

    meets_pods: bool = False
    """An operator tells it of the run's other pods."""

    def begin(self, facts: RunFacts) -> None:
        """Before anything else; once."""
        self.facts = facts

    # --- what is there -----------------------------------------------------------------------

    async def look(self) -> Inventory:
        """Everything that it holds of this run, now. Never raises: one that is away answers
        UNKNOWN, with the reason."""
        raise NotImplementedError

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        """Where it can be read, nearest first."""
        raise NotImplementedError

    def refuse(self, source: ShardSource) -> None:
        """What it gave was not what it should be: it is not named again."""

    @property
    def ids(self) -> frozenset[StepId]:
        """Steps of `ancestor` that were offered, ever."""
        return frozenset()

    # --- what is sent there ------------------------------------------------------------------

    def wake(self) -> None:
        """What this machine holds is different: compare soon."""

    def want(self, id: StepId) -> None:
        """Send this step although it is not due: somebody waits for it. Every pod of the run must
        be told, as each sends its own ranks' shards."""

    def had(self, id: StepId) -> bool:
        """Whether all of this step is there, or was until it expired."""
        return False

    def in_use(self, id: StepId) -> bool:
        """A local shard of this step is being sent, or is the next one: do not retire it now."""
        return False

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        """Wait until everything that should be there is. False when the time is up first.

        `whole` False: only what this sidecar itself must send, and no longer when that fails: for
        the end of a pod, whose neighbours may have ended already.
        """
        return True

    # --- other pods --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """`host:port` where other pods find this one, '' when nothing is served."""
        return ""

    @property
    def introduced(self) -> bool:
        """Whether it is known who all the others are."""
        return True

    def peers_are(
        self, peers: tuple[Peer, ...], *, awaits: str = "", complete: bool = True
    ) -> None:
        """Whoever is missing is a peer no more. `awaits`: see `ReportReply`; `complete`: nobody
        else can hold anything."""

    def kept(self) -> Sequence[Shard]:
        """Complete copies that lie here for other pods: `ReportedRank.peer` in a report."""
        return ()

    async def make_room(self, size_bytes: int) -> bool:
        """A volume is full: let copies go, oldest first, but never the newest committed one of a
        rank. False when there was nothing to let go."""
        return False

    # --- working -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled."""
        await asyncio.Event().wait()

    def status(self) -> TierStatus:
        """How it goes."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of sockets and threads."""
