"""What the sidecar says of itself: the documents of GET /v1/status and GET /v1/history.

Apart from `protocol`, because a trainer never reads it and would pay for it at every import.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from keepstep.core.goodput import Goodput
from keepstep.core.history import Event, Restart
from keepstep.core.schedule import Interval, Measured
from keepstep.steps import Epoch, StepId, Tier


@dataclass(frozen=True, kw_only=True)
class SlotStatus:
    """One slot of a rank. `state`: empty | assigned | sealed; `pinned` by the persister."""

    slot: str
    state: str
    id: StepId | None = None
    pinned: bool = False


@dataclass(frozen=True, kw_only=True)
class RankCounters:
    """One rank of this pod. `alive`: a trainer holds its lease now. Counters since the sidecar
    started."""

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
    """One rank as the sidecar sees it. `waits`: why its vote on what to restore has to wait, ''
    while there is none that waits. `restart`: its last one."""

    pid: int = 0
    durable: StepId | None = None
    slot_bytes: int = 0
    slots: tuple[SlotStatus, ...] = ()
    copy_s: float = 0.0
    warning: str = ""
    waits: str = ""
    restart: Restart | None = None


@dataclass(frozen=True, kw_only=True)
class VolumeUsage:
    """One volume. `engine`: direct (O_DIRECT) or buffered, and why. `failed`: why it takes no
    writes, '' when it does."""

    engine: str
    used_bytes: int
    free_bytes: int
    capacity_bytes: int | None = None
    failed: str = ""
    quarantined: int = 0


@dataclass(frozen=True, kw_only=True)
class VolumeStatus(VolumeUsage):
    """`path`: the run's directory on it."""

    path: str


@dataclass(frozen=True, kw_only=True)
class TierProgress:
    """How it goes with what is beyond this pod: `tier` peer or archive, `where` it is. Counters
    since the sidecar started, in shards and bytes.

    `backlog`: shards that should be there and are not yet; `behind_s`: for how long the oldest of
    them waits. `trouble`: the last error, '' when the last attempt went well.
    """

    tier: Tier
    where: str
    sent: int = 0
    sent_bytes: int = 0
    failures: int = 0
    backlog: int = 0
    behind_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class TierStatus(TierProgress):
    """How long sending took, and what was fetched from there. `shared_bytes`: of copies that this
    machine keeps for others, what took no space again as its own shards have it."""

    sent_seconds: float = 0.0
    received_bytes: int = 0
    received_seconds: float = 0.0
    shared_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepStatus:
    """One step that is held somewhere. `path` is set once it is committed on local. `suspect`: a
    restore goes further back; `proven`: see `keepstep.core.suspicion`."""

    id: StepId
    world: int
    memory_ranks: tuple[int, ...] = ()
    local_ranks: tuple[int, ...] = ()
    peer_ranks: tuple[int, ...] = ()
    archive_ranks: tuple[int, ...] = ()
    bytes: int = 0
    committed: bool = False
    path: str = ""
    dead: bool = False
    suspect: bool = False
    proven: bool = False

    @property
    def whole(self) -> bool:
        """Whether every rank's image of it is known here."""
        known = {*self.memory_ranks, *self.local_ranks, *self.peer_ranks, *self.archive_ranks}
        return self.committed or len(known) == self.world


@dataclass(frozen=True, kw_only=True)
class Status:
    """GET /v1/status: everything a person asks first. Times are unix seconds.

    `locked`: what keeps slots from being swapped, or "no" and why nothing does. `hints`: what would
    make the run faster. `reported_at`: when the operator last answered a report, None without one.
    `evicted`: steps that were deleted because the volumes were full. `persist_interval`: what was
    chosen from `persist_measured`, None where a person chose or it is too early; `persist_every` is
    more where a drive does not keep up. `goodput`: over all lives of the run on this machine, None
    before the first restore. `scanned`: it has looked at its volumes, so that `steps` are all that
    lie there.
    """

    run: str
    sidecar: str
    pid: int
    started_at: float
    protocol_min: int
    protocol_max: int
    locked: str
    hints: tuple[str, ...] = ()
    epoch: Epoch | None = None
    watermarks: dict[str, StepId] = dataclasses.field(default_factory=dict)
    committed_at: float | None = None
    reported_at: float | None = None
    persist_every: int = 1
    persist_interval: Interval | None = None
    persist_measured: Measured | None = None
    stage_every: int = 1
    persisted: int = 0
    persist_skipped: int = 0
    persist_seconds: float = 0.0
    persist_bytes: int = 0
    evicted: int = 0
    goodput: Goodput | None = None
    ranks: tuple[RankStatus, ...] = ()
    volumes: tuple[VolumeStatus, ...] = ()
    depots: tuple[TierStatus, ...] = ()
    steps: tuple[StepStatus, ...] = ()
    scanned: bool = True
    survives: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    window_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    window_shared_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class History:
    """GET /v1/history?since=SEQ: what happened since, oldest first; without `since`, all that is
    still known.

    `last`: the newest sequence, what to ask for next; less than `since` where the history was lost
    and began anew. `oldest`: the first that is still known; what came between `since` and that one
    is forgotten.
    """

    run: str
    oldest: int
    last: int
    events: tuple[Event, ...] = ()
