"""What the sidecar says of itself: the documents of GET /v1/status and GET /v1/history.

A module of its own beside `trainer`: few trainers read these documents, and every import of
keepstep would pay for them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from keepstep.core.history import Goodput, HistoryEvent, RestartCost
from keepstep.core.schedule import NodeMeasurements, PersistInterval
from keepstep.steps import Epoch, StepId, Tier


@dataclass(frozen=True, kw_only=True)
class SlotStatus:
    """One slot of a rank. `state`: a `SlotState`, or "orphan". `pinned`: its image is being
    read."""

    slot: str
    state: str
    id: StepId | None = None
    pinned: bool = False


@dataclass(frozen=True, kw_only=True)
class RankCounters:
    """Counters of one rank of this pod, since the sidecar started. `alive`: a trainer holds the
    rank's lease now."""

    rank: int
    world: int
    alive: bool
    staged: StepId | None = None
    saves: int = 0
    skipped: int = 0
    discarded: int = 0
    blocked_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankStatus(RankCounters):
    """One rank as the sidecar sees it. `waits`: why its vote on what to restore must wait; '' if no
    vote waits. `restart`: the last restart."""

    pid: int = 0
    durable: StepId | None = None
    slot_bytes: int = 0
    slots: tuple[SlotStatus, ...] = ()
    copy_s: float = 0.0
    warning: str = ""
    waits: str = ""
    restart: RestartCost | None = None


@dataclass(frozen=True, kw_only=True)
class VolumeUsage:
    """One volume. `engine`: direct (O_DIRECT), or buffered and why. `failed`: why the volume takes
    no writes; '' if it does."""

    engine: str
    used_bytes: int
    free_bytes: int
    capacity_bytes: int | None = None
    failed: str = ""
    quarantined: int = 0


@dataclass(frozen=True, kw_only=True)
class VolumeStatus(VolumeUsage):
    """One volume of this machine. `path`: the run's directory on it."""

    path: str


@dataclass(frozen=True, kw_only=True)
class RemoteTierProgress:
    """The progress of a tier beyond this pod. `where`: where it is. Counters since the sidecar
    started, in shards and bytes.

    `backlog`: shards that should be there and are not there yet. `behind_s`: for how many seconds
    the oldest of them has waited. `trouble`: the last error; '' if the last attempt succeeded.
    """

    where: str
    sent: int = 0
    sent_bytes: int = 0
    failures: int = 0
    backlog: int = 0
    behind_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class TierStatus(RemoteTierProgress):
    """As `RemoteTierProgress`, with the time that sending took and what was fetched from the tier.
    `shared_bytes`: of the copies that this machine keeps for other pods, the bytes that take no
    space of their own because this machine's own shards contain them."""

    sent_seconds: float = 0.0
    received_bytes: int = 0
    received_seconds: float = 0.0
    shared_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepStatus:
    """One step that is held somewhere. `ranks`: by tier, nearest first, the ranks whose images are
    there. `path`: set once the step is committed on local. `suspect`: a restore passes it over.
    `suspect` and `proven`: see `keepstep.core.suspicion`."""

    id: StepId
    world: int
    ranks: dict[Tier, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    bytes: int = 0
    committed: bool = False
    path: str = ""
    dead: bool = False
    suspect: bool = False
    proven: bool = False

    @property
    def holding_ranks(self) -> tuple[int, ...]:
        """The ranks whose image is on at least one tier, ascending."""
        return tuple(sorted({rank for ranks in self.ranks.values() for rank in ranks}))

    @property
    def whole(self) -> bool:
        """Whether the step is committed, or an image of each of its ranks is known here."""
        return self.committed or len(self.holding_ranks) == self.world


@dataclass(frozen=True, kw_only=True)
class Uncaught:
    """An error that ended a trainer before it kept a step, at `at`. `repeats`: the next start ends
    in the same error."""

    reason: str
    at: float
    repeats: bool


@dataclass(frozen=True, kw_only=True)
class Status:
    """GET /v1/status: everything that a person asks first. Times are unix seconds.

    `locked`: what keeps slots from being swapped, or "no" and the reason. `hints`: what would make
    the run faster. `reported_at`: when the run's leader last answered a report; None before
    that. `evicted`: steps that were deleted because the volumes were full. `persist_interval`:
    the interval chosen from `persist_measured`; None if a person chose it, or if it is too early.
    `persist_every`: the interval in use, longer if a drive does not keep up. `goodput`: over all
    lives of the run on this machine; None before the first restore. `scanned`: the sidecar has
    scanned its volumes, so `steps` includes all steps that lie there. `leased_at`: when a trainer
    last took its rank; None: none did since the sidecar started. `uncaught`: the newest error of a
    script, or the newest that repeats; None once a step was staged after it.
    """

    run: str
    sidecar: str
    pid: int
    started_at: float
    protocol: int
    locked: str
    hints: tuple[str, ...] = ()
    epoch: Epoch | None = None
    watermarks: dict[str, StepId] = dataclasses.field(default_factory=dict)
    committed_at: float | None = None
    reported_at: float | None = None
    persist_every: int = 1
    persist_interval: PersistInterval | None = None
    persist_measured: NodeMeasurements | None = None
    stage_every: int = 1
    persisted: int = 0
    persist_skipped: int = 0
    persist_seconds: float = 0.0
    persist_bytes: int = 0
    evicted: int = 0
    goodput: Goodput | None = None
    ranks: tuple[RankStatus, ...] = ()
    volumes: tuple[VolumeStatus, ...] = ()
    tiers: dict[Tier, TierStatus] = dataclasses.field(default_factory=dict)
    steps: tuple[StepStatus, ...] = ()
    scanned: bool = True
    survives: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    leased_at: float | None = None
    uncaught: Uncaught | None = None
    window_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    window_shared_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class HistoryPage:
    """GET /v1/history?since=SEQ: the events after SEQ, oldest first; without `since`, all that are
    still known.

    `last`: the sequence of the newest event, to be used as the next `since`. It is less than
    `since` if the history was lost and started again. `oldest`: the sequence of the first event
    that is still known. Events between `since` and `oldest` are forgotten.
    """

    run: str
    oldest: int
    last: int
    events: tuple[HistoryEvent, ...] = ()
