"""What a sidecar tells the operator, and what it hears back: JSON over HTTPS, on Kubernetes only.

A report is level-triggered: it says what *is* there, so one that is lost or repeated changes
nothing. It is whole, or, with an operator that says so, tells what has changed `since` the last one
that was answered. It names no namespace, run or node rank: the operator takes those from its own
record of the pod whose token came with it. A field may be added with a default; nothing may be
removed or change its meaning (the sidecar is pinned per run, the operator is upgraded under it).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from keepstep.core.goodput import Badput, Goodput
from keepstep.core.ledger import RankReport, Reported
from keepstep.core.ranks import NOBODY, Ranks, shared
from keepstep.core.shard import Shard, Told
from keepstep.core.suspicion import Failure
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier
from keepstep.wire.status import RankCounters, TierProgress, VolumeUsage

PATH = "/v1/reports"
AUDIENCE = "reports.keepstep.dev"
"""Of the projected service-account token that a sidecar shows."""

STILL_USED_EXIT = 3
"""Exit status of a pod that was to remove a run's directories, and found that the run lived after
the operator had taken it for gone."""


_Image = TypeVar("_Image", bound="ReportedShard")


@dataclass(frozen=True, kw_only=True)
class ReportedShard:
    """A `Shard` of the rank that it is reported under.

    `twin_runs`: the rank and its twins. `twins`: the twins as a list, for whoever does not say that
    it reads runs, and where runs would be too many.
    """

    id: StepId
    world: int
    root: str | None = None
    params_digest: str | None = None
    written_at: float | None = None
    twins: tuple[int, ...] = ()
    bytes: int = field(default=0, compare=False)
    twin_runs: Ranks = NOBODY

    def __post_init__(self) -> None:
        if self.twin_runs:
            if not self.twin_runs.is_short or self.twin_runs.last >= self.world:
                raise ValueError("twins that cannot be")
            object.__setattr__(self, "twin_runs", shared(self.twin_runs))

    @property
    def alike(self) -> Ranks:
        return self.twin_runs or Ranks.of(self.twins)

    @property
    def step_id(self) -> StepId:
        return self.id

    @property
    def size_bytes(self) -> int:
        return self.bytes

    @classmethod
    def of(cls, shard: Told) -> ReportedShard:
        return cls(
            id=shard.step_id,
            world=shard.world,
            root=shard.root,
            params_digest=shard.params_digest,
            written_at=shard.written_at,
            bytes=shard.size_bytes,
            twins=() if shard.alike.is_short else tuple(shard.alike),
            twin_runs=shard.alike if shard.alike.is_short else NOBODY,
        )

    def with_list(self: _Image, rank: int) -> _Image:
        """Told as `rank`'s to one who reads no runs."""
        if not self.twin_runs:
            return self
        return replace(self, twins=tuple(one for one in self.twin_runs if one != rank))

    def shard(self, rank: int) -> Shard:
        return Shard(
            step_id=self.id,
            rank=rank,
            world=self.world,
            size_bytes=self.bytes,
            root=self.root,
            params_digest=self.params_digest,
            written_at=self.written_at,
            alike=self.twin_runs or (Ranks.of((rank, *self.twins)) if self.twins else NOBODY),
        )


@dataclass(frozen=True, kw_only=True)
class ReportedRank(RankCounters):
    """`staged_at` in unix seconds. `peer`: copies kept here for another pod, of its ranks, so
    such a rank is never `alive` here. `archive`: what the archive was seen to hold of it.

    A tier whose answer is None does not exist on this pod, or is not spoken of in this report. Of a
    tier that `gone` names, only what came to it is listed, and there the steps that left it.
    """

    memory: tuple[ReportedShard, ...] = ()
    local: tuple[ReportedShard, ...] = ()
    memory_answer: Answer | None = Answer.UNKNOWN
    local_answer: Answer | None = Answer.UNKNOWN
    staged_at: float | None = None
    peer: tuple[ReportedShard, ...] = ()
    archive: tuple[ReportedShard, ...] = ()
    peer_answer: Answer | None = None
    archive_answer: Answer | None = None
    gone: dict[Tier, tuple[StepId, ...]] = field(default_factory=dict)

    def with_lists(self) -> ReportedRank:
        """Told to one who reads no runs."""
        listed = {
            str(tier): tuple(one.with_list(self.rank) for one in held)
            for tier, (held, _) in self.by_tier().items()
        }
        return replace(self, **listed)  # type: ignore[arg-type]

    def by_tier(self) -> dict[Tier, tuple[tuple[ReportedShard, ...], Answer | None]]:
        """What it lists of each tier, and its answer."""
        return {
            Tier.MEMORY: (self.memory, self.memory_answer),
            Tier.LOCAL: (self.local, self.local_answer),
            Tier.PEER: (self.peer, self.peer_answer),
            Tier.ARCHIVE: (self.archive, self.archive_answer),
        }


@dataclass(frozen=True, kw_only=True)
class ReportedRestore:
    """One restore that a rank finished: `epoch.parent` is the step, None for a start at step 0.

    `lost_steps`: steps that this rank had staged or reported beyond it. `at` unix seconds.
    """

    rank: int
    epoch: Epoch
    tier: Tier | None
    seconds: float
    at: float
    lost_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class ReportedVolume(VolumeUsage):
    """`name`: the pod mounts it under that."""

    name: str


@dataclass(frozen=True, kw_only=True)
class ReportedGoodput:
    """What this pod's sidecar counts of the run (docs/goodput.md), up to now: all between `since`
    and `until` (unix seconds, by this machine's clock), also of lives before its own.

    `id`: made when the history was begun that this is counted from. The same one goes on from what
    was told before under it, also by an earlier pod whose volume this one has. `epoch`: the newest
    life. `step`: its newest, -1 for none; `steps`: those that nothing went back over, which took
    `productive_s`.
    """

    id: str
    since: float
    until: float
    epoch: EpochId
    step: int
    steps: int
    productive_s: float
    badput: Badput

    @classmethod
    def of(cls, goodput: Goodput, id: str) -> ReportedGoodput:
        told = {one.name: getattr(goodput, one.name) for one in fields(cls) if one.name != "id"}
        return cls(id=id, **told)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another pod of the run. `address`: `host:port` of its sidecar, for mutual TLS.

    `buddy`: send it the shards of this pod. Of all others only what is missing is fetched.
    """

    node_rank: int
    address: str
    buddy: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """POST /v1/reports. `sequence` grows with every report of one sidecar process; `sent_at` is the
    sidecar's clock in unix seconds, and only ever shown, never compared with another clock.

    `library`: version of the library in the training image, '' while no trainer came. `pinned`:
    what keeps slots from being swapped ("hugepages", "mlock"), or "no" and why nothing does.
    `ready`: the volumes were scanned. `peer_address`: where other pods of the run find this one, ''
    when it serves none. `since`: the sequence of the report that this one tells changes to, of
    `epochs`, `ranks`, `restores` and `goodput`; 0: it is whole. `failures`: of the script's own,
    all that are known here. `goodput`: None before the first restore. `peers_version`: of the list
    of peers that is known here, '' for none; None: list them each time.
    """

    sidecar: str
    started_at: float
    sequence: int
    sent_at: float
    since: int = 0
    ready: bool = False
    library: str = ""
    pinned: str = ""
    epochs: tuple[Epoch, ...] = ()
    ranks: tuple[ReportedRank, ...] = ()
    restores: tuple[ReportedRestore, ...] = ()
    volumes: tuple[ReportedVolume, ...] = ()
    warnings: tuple[str, ...] = ()
    persisted: int = 0
    persist_skipped: int = 0
    persist_bytes: int = 0
    persist_seconds: float = 0.0
    flushing: bool = False
    peer_address: str = ""
    depots: tuple[TierProgress, ...] = ()
    failures: tuple[Failure, ...] = ()
    goodput: ReportedGoodput | None = None
    peers_version: str | None = None

    def as_reported(self, node_rank: int, *, ordered: int) -> Reported:
        """The ledger's event. `ordered`: a number that grows over all sidecars of this pod's place
        in the run (a restarted one begins its `sequence` anew)."""
        return Reported(
            node_rank=node_rank,
            ranks={one.rank: _rank_report(one) for one in self.ranks},
            epochs=self.epochs,
            sequence=ordered,
        )


@dataclass(frozen=True, kw_only=True)
class ReportReply:
    """What the operator knows of the whole run, and how often it wants to hear.

    `committed`: watermark by tier. `commits`: the steps on this pod's volumes that all ranks have:
    it may hear of several at a time, and not all between two of them are whole. `plan`: the step
    that a restart would restore, a hint to fetch and hash it now. `retire`: steps of which no local
    copy is needed on this pod any more.
    `pinned`: steps that stay even when a volume is full.
    `peers`: the other pods of the run that serve, or that hold copies of this pod's shards.
    `peers_version`: names this list by what it says; the version that the report named: it is the
    same list, and not repeated. '': the list is whole.
    `restore_from`: a person wants the next epoch to go on from this very step, so no newer one is a
    candidate; of another run's archive where `restore_run` names one. None: nobody wants that.
    `awaits`: shards of this pod's ranks that are being made reachable, '' when none are: a vote
    waits for them a while, and does not say "nothing is there" meanwhile.
    `all_peers`: every pod of the run has reported, so `peers` names all that serve; else a pod that
    it does not name may hold something, too.
    `authorities`: PEM of all by which the operator is to be known from now on, instead of those
    known so far; '' where it does not say.
    `leaving`: a pod of the run is being deleted, so its newest steps should become durable on all
    pods now, and be archived, whatever the schedules say.
    `interval_s`: the longest silence, `least_gap_s`: the shortest, between two reports.
    `changes_since`: the sequence of the report up to which everything is known, so that the next
    one may tell changes to it alone; with any other number than that of the report which this
    answers, as 0, the next one has to be whole.
    `archive`: a committed step that the archive gets in the stead of a due one that never was one.
    `failures`: of the script's own, as all pods told: a pod that was made anew has no record.
    `reads_runs`: of images it reads `twin_runs`; to one that does not say so, `twins` are listed.
    """

    interval_s: float = 30.0
    least_gap_s: float = 1.0
    committed: dict[str, StepId] = field(default_factory=dict)
    commits: tuple[StepId, ...] = ()
    plan: StepId | None = None
    retire: tuple[StepId, ...] = ()
    pinned: tuple[StepId, ...] = ()
    peers: tuple[Peer, ...] = ()
    peers_version: str = ""
    restore_from: StepId | None = None
    restore_run: str = ""
    awaits: str = ""
    all_peers: bool = False
    leaving: bool = False
    changes_since: int = 0
    authorities: str = ""
    archive: StepId | None = None
    failures: tuple[Failure, ...] = ()
    reads_runs: bool = False


def _rank_report(one: ReportedRank) -> RankReport:
    told = {tier: each for tier, each in one.by_tier().items() if each[1] is not None}
    return RankReport(
        sealed={tier: held for tier, (held, _) in told.items()},
        answers={tier: answer for tier, (_, answer) in told.items() if answer is not None},
        gone=one.gone,
    )


# --- certificates ----------------------------------------------------------------------------
#
# What other pods of its run know a sidecar by: JSON over HTTPS, with the token that reports carry.
# The request names nobody: the operator takes namespace, run and node rank from its own record of
# the pod, and signs only those.


CERTIFICATES_PATH = "/v1/certificates"


@dataclass(frozen=True, kw_only=True)
class CertificateRequest:
    """`request`: PEM of a PKCS #10 request; only its public key counts."""

    request: str


@dataclass(frozen=True, kw_only=True)
class IssuedCertificate:
    """PEM. `authorities`: all that sign, or have signed, for pods; trust no others."""

    certificate: str
    authorities: str
