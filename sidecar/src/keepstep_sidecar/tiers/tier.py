"""What is beyond this machine: a buddy's volume, an archive. One interface for both.

A depot takes shards that are durable here and gives verified ones back. It decides nothing: what is
complete, what may go and what is restored is the ledger's business. Everything that it does waits
on a network, so its methods are coroutines that can be cancelled, and a depot that is slow or away
never holds up a write to a local volume, let alone a trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from keepstep.core.shard import Shard
from keepstep.image import ControlPage, Layout
from keepstep.steps import Answer, Epoch, StepId, Tier
from keepstep.wire.reports import Peer
from keepstep.wire.status import DepotStatus as DepotStatus
from keepstep_sidecar.volume.scan import LocalShard


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShard(Shard):
    """A shard that a depot holds. `where`: for people, like `s3://ckpt/gpt` or `node rank 3`.
    `key`: the depot's own."""

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
    """What a depot holds of this run. `reason` explains `Answer.UNKNOWN`.

    `complete`: steps of which the depot itself knows that all shards are there (an archive's
    `step.json`); a depot without such knowledge leaves it empty.
    """

    answer: Answer
    shards: tuple[RemoteShard, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    complete: frozenset[StepId] = frozenset()
    reason: str = ""


class Depot(Protocol):
    """See the module. All errors are KeepstepErrors: StorageError when it cannot be reached or
    answers wrongly, DigestError and kin when what it gave is not what was sent."""

    @property
    def tier(self) -> Tier:
        """`PEER` or `ARCHIVE`."""

    async def look(self) -> Inventory:
        """Everything that it holds of this run, now. Never raises: a depot that is away answers
        UNKNOWN, with the reason."""

    async def layout(self, shard: RemoteShard) -> Layout:
        """The shard's header. Raises StorageError, ImageError."""

    async def control(self, shard: RemoteShard) -> ControlPage:
        """The shard's control page, its seal checked. Raises StorageError, ImageError."""

    async def load(self, shard: RemoteShard, view: memoryview) -> ControlPage:
        """The whole image into the page-aligned slot `view`, every byte verified, the seal last.

        Raises StorageError, ImageError; the slot then holds no seal.
        """

    async def chunks(self, shard: RemoteShard, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """(chunk number, buffer of exactly its bytes): fill each, verified against the shard's
        digest table. Raises StorageError, ImageError."""

    def durable(self, found: LocalShard) -> None:
        """A shard of this machine is durable: send it, if that is what this depot does."""

    def committed(self, id: StepId, shards: Mapping[int, LocalShard]) -> None:
        """A step is committed; `shards`: those of this machine. Level-triggered: said again for
        every step that is committed and still here after a restart."""

    def forget(self, ids: Collection[StepId]) -> None:
        """These steps are dead or retired here: what was not sent yet need not be sent."""

    def in_use(self, id: StepId) -> bool:
        """A local shard of this step is being sent, or is the next one: do not retire it now."""

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        """Wait until everything that should be there is. False when the time is up first.

        `whole` False: only what this sidecar itself must send, and no longer when that fails: for
        the end of a pod, whose neighbours may have ended already.
        """

    async def run(self) -> None:
        """Work until cancelled."""

    def status(self) -> DepotStatus:
        """How it goes."""

    async def close(self) -> None:
        """Let go of sockets and threads."""


@runtime_checkable
class Keeper(Protocol):
    """A depot that also keeps copies for other pods, on the volumes of this machine."""

    commit: Callable[[], StepId | None]
    """The run's newest commit, as far as this machine was told."""

    def kept(self) -> tuple[Shard, ...]:
        """The copies that lie here, complete: what a report says in `ReportedRank.peer`."""

    async def make_room(self, size_bytes: int) -> bool:
        """A volume is full: let copies go, oldest first, but never the newest committed one of a
        rank. False when there was nothing to let go."""


@runtime_checkable
class Acquainted(Protocol):
    """A depot that an operator tells of the run's other pods."""

    @property
    def address(self) -> str:
        """`host:port` where they find this pod, '' when nothing is served."""

    @property
    def introduced(self) -> bool:
        """Whether it is known who all the others are."""

    def peers_are(
        self, peers: tuple[Peer, ...], *, awaits: str = "", complete: bool = True
    ) -> None:
        """Whoever is missing is a peer no more. `awaits`: see `ReportReply`; `complete`: nobody
        else can hold anything."""


@runtime_checkable
class Retaining(Protocol):
    """A depot that has a schedule and a retention of its own."""

    pinned: Callable[[], Collection[StepId] | None]
    """Steps that it must not retire."""

    def want(self, id: StepId) -> None:
        """Send this step although it is not due: somebody waits for it. Every pod of the run must
        be told, as each sends its own ranks' shards."""


@runtime_checkable
class Ancestor(Protocol):
    """A depot of steps of another run, `ancestor`. A run that has nothing of its own begins from
    one of them instead of at step 0, and so only where step 0 would be allowed."""

    ancestor: str
    outgrown: Callable[[], bool]
    """Whether the run has steps of its own to go on from: then nothing is asked or offered."""

    @property
    def ids(self) -> frozenset[StepId]:
        """Steps that were offered, ever."""


@runtime_checkable
class Noticing(Protocol):
    """A depot that knows when there is something new to `look` at."""

    changed: Callable[[], None]
    """To be called then."""
