"""What the sidecar of a machine reports to the leader of its run, and the reply: JSON in frames
over mutual TLS (docs/adr/0020-a-run-leads-itself.md).

A report is level-triggered: it says what *is* there, so a lost or repeated report changes nothing.
It is whole; or, if the leader allows it, it has only the changes `since` the last report that was
answered. It names no run and no node rank: the leader takes these from the member's certificate.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field, fields

from keepstep.core.commit_rule import RanksReport
from keepstep.core.history import Badput, Goodput
from keepstep.core.ledger import Reported
from keepstep.core.shard import ShardsOfStep
from keepstep.core.suspicion import Failure
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.run_reports import SaveOverhead
from keepstep.wire.status import RemoteTierProgress, VolumeUsage

AUDIENCE = "reports.keepstep.dev"
"""Audience of the projected service-account token that a sidecar shows."""


@dataclass(frozen=True, kw_only=True)
class ReportedRanks(RanksReport):
    """What a report says of some ranks, each of which is in the same state and has the same steps:
    of all ranks of a machine, as nearly always.

    `alive`: a trainer holds the rank's lease. `staged`: the newest step that it sealed since the
    sidecar started.

    `tiers`: a tier that is not named does not exist on this pod, or this report does not cover it.
    Under `peer` are copies that this pod keeps of images of a rank that another pod has, or had
    before the pods came back in another order; under `archive`, the rank's images that were seen
    there.
    """

    world: int
    alive: bool
    staged: StepId | None = None

    @property
    def grouping_key(self) -> object:
        """What ranks must have in common to be reported together."""
        return self.world, self.alive, self.staged, super().grouping_key

    def shards(self, *tiers: Tier) -> tuple[ShardsOfStep, ...]:
        """All shards that are listed under these tiers; without arguments, under any."""
        named = tiers or tuple(self.tiers)
        return tuple(
            shard for tier in named if tier in self.tiers for shard in self.tiers[tier].shards
        )


@dataclass(frozen=True, kw_only=True)
class ReportedRestore:
    """One restore that a rank finished. `epoch.parent`: the restored step; None: a start at step 0.

    `lost_steps`: how many steps this rank had staged or reported beyond that step. `at`: unix
    seconds.
    """

    rank: int
    epoch: Epoch
    tier: Tier | None
    seconds: float
    at: float
    lost_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class ReportedVolume(VolumeUsage):
    """One volume of this pod. `name`: the name under which the pod mounts it. `drive_id`: names the
    file system that it lies on (`UUID@position`); '' if nothing in the pod tells."""

    name: str
    drive_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ReportedGoodput:
    """The goodput of the run that this pod's sidecar has counted so far (docs/goodput.md): from
    `since` to `until` (unix seconds of this machine's clock), including earlier lives.

    `id`: names the history from which this is counted; made when that history began. A report with
    the same `id` continues earlier ones, also those of an earlier pod whose volume this pod has.
    `epoch`: the newest epoch. `step`: its newest step, -1 for none. `steps`: how many steps no
    restore went back over. They took `productive_s` seconds.
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
    def from_goodput(cls, goodput: Goodput, history_id: str) -> ReportedGoodput:
        counts = {
            attribute.name: getattr(goodput, attribute.name)
            for attribute in fields(cls)
            if attribute.name != "id"
        }
        return cls(id=history_id, **counts)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another pod of the run. `address`: `host:port` of its sidecar, for mutual TLS.

    `buddy`: this pod sends its shards there. From other pods it only fetches what is missing.
    """

    node_rank: int
    address: str
    buddy: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """A member's report, in `MemberReport`.

    `sequence`: grows with every report of one sidecar process. `since`: the sequence of the
    earlier report to which this one has the changes (of `epochs`, `ranks`, `restores` and
    `goodput`); 0: this report is whole. No rank is in two of `ranks`. `stall`: of all ranks of this
    pod. `ready`: the volumes were scanned. `library`: version of
    the library in the training container; '' before the first trainer. `pinned`: what keeps slots
    from being swapped ("hugepages", "mlock"), or "no" and the reason. `peer_address`: the address
    at which other pods of the run reach this one; '' if it serves none. `tiers`: how far those
    beyond this pod are. `failures`: all failures of
    the script itself that are known here. `goodput`: None before the first restore.
    `peers_version`: the version of the list of peers that this sidecar has; '': it has none.
    `refusals`: how often the ranks' vote refused since the last restore. `refused`: why, in its own
    words.
    """

    sidecar: str
    started_at: float
    sequence: int
    since: int = 0
    ready: bool = False
    library: str = ""
    pinned: str = ""
    epochs: tuple[Epoch, ...] = ()
    ranks: tuple[ReportedRanks, ...] = ()
    stall: SaveOverhead = field(default_factory=SaveOverhead)
    restores: tuple[ReportedRestore, ...] = ()
    volumes: tuple[ReportedVolume, ...] = ()
    warnings: tuple[str, ...] = ()
    peer_address: str = ""
    tiers: dict[Tier, RemoteTierProgress] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    goodput: ReportedGoodput | None = None
    peers_version: str = ""
    refusals: int = 0
    refused: str = ""

    @property
    def reported_ranks(self) -> int:
        """The ranks that it tells of, as a bitmap."""
        return functools.reduce(operator.or_, (rank.bits for rank in self.ranks), 0)

    def to_ledger_event(self, node_rank: int, *, ordered: int) -> Reported:
        """The ledger's event. `ordered`: a number that grows over all sidecars of this node rank,
        because a restarted sidecar starts its `sequence` again."""
        return Reported(
            node_rank=node_rank,
            ranks=self.ranks,
            epochs=self.epochs,
            sequence=ordered,
        )


@dataclass(frozen=True, kw_only=True)
class ReportReply:
    """What the leader knows of the whole run, and how often it wants reports.

    `interval_s`: the longest time between two reports. `least_gap_s`: the shortest.
    `committed`: the watermark by tier. `commits`: the steps on this pod's volumes that all ranks
    have. All are named, because several may be committed between two replies, and not every step
    between two commits is one. `plan`: the step that a restart would restore; a hint to fetch and
    hash it now. `retire`: steps of which this pod needs no local copy any more.
    `pinned`: steps that stay even when a volume is full.
    `peers`: the other pods of the run that serve, or that hold copies of this pod's shards.
    `peers_version`: names the content of this list. If it is the version that the report named, the
    list is unchanged and not repeated.
    `restore_from`: a person wants the next epoch to go on from exactly this step, so no newer one
    is a candidate; None: no such wish.
    `agents`: the addresses of agents, by node, that serve shards which this pod's place left there.
    `awaits`: such shards of which no agent is ready yet; '': none. A vote waits for them for a
    while, and does not answer NONE meanwhile.
    `all_peers`: every pod of the run has reported, so `peers` names all that serve. Otherwise a pod
    that is not named may hold images, too.
    `authorities`: PEM of all authorities by which the operator is recognized from now on, replacing
    those known so far; '': no change.
    `leaving`: a pod of the run is being deleted, so the newest steps should become durable on all
    pods and be archived now, whatever the schedules say.
    `changes_since`: the sequence of the report up to which the leader knows everything. If it is
    that of the report which this answers, the next report may have only the changes. With any
    other number, like 0, the next report must be whole.
    `archive`: a committed step to archive instead of a due step that was never committed.
    `failures`: failures of the script itself, from all pods, because a new pod has no record.
    `begin_again`: a person wants the run to begin at step 0 if no step can be restored.
    `gone_for_good`: what no pod of the run can reach cannot come back, and the policy says to begin
    again then.
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
    agents: dict[str, str] = field(default_factory=dict)
    restore_from: StepId | None = None
    awaits: str = ""
    all_peers: bool = False
    leaving: bool = False
    changes_since: int = 0
    authorities: str = ""
    archive: StepId | None = None
    failures: tuple[Failure, ...] = ()
    begin_again: bool = False
    gone_for_good: bool = False


# --- certificates ----------------------------------------------------------------------------
#
# A sidecar's certificate, by which other pods of its run recognize it: JSON over HTTPS, with the
# token that reports carry. The request names no pod: the operator takes namespace, run and node
# rank from its own record of the pod, and signs only these.


CERTIFICATES_PATH = "/v1/certificates"
AGENTS = "~agent"
"""In place of a namespace, in an agent's identity: `keepstep://~agent/<node>/0`."""


@dataclass(frozen=True, kw_only=True)
class CertificateRequest:
    """POST /v1/certificates. `request`: PEM of a PKCS #10 request, of which only the public key is
    used."""

    request: str


@dataclass(frozen=True, kw_only=True)
class IssuedCertificate:
    """The reply, in PEM. `authorities`: all authorities that sign, or have signed, for pods. Trust
    no others."""

    certificate: str
    authorities: str


# --- frames ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PinnedSteps:
    """The steps that a person pinned. `version` grows with each change; the highest one counts."""

    version: int = 0
    steps: tuple[StepId, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """A member's frame. `life`: names its sidecar's process. `nodes`: how many machines it takes
    the run to have; 0: an operator knows. `heard`: the number of the newest reply that it has acted
    on. `pins`: those that it has on record. `pod`: the UID of its pod, and `node`: the name of its
    node; '' where there is no operator. `leaving`: its pod begins to end."""

    life: str
    nodes: int
    report: Report
    heard: int = 0
    pins: PinnedSteps = field(default_factory=PinnedSteps)
    pod: str = ""
    node: str = ""
    leaving: bool = False


@dataclass(frozen=True, kw_only=True)
class LeaderReply:
    """The leader's frame: an answer, or sent because something has changed.

    `epoch`: the newest one that it knows of. `number` grows
    with every reply to this member. `answers`: the sequence of the newest report that it took from
    the member. `closing`: the leader ends once its members have acted on this reply.
    """

    number: int
    reply: ReportReply
    epoch: EpochId | None = None
    answers: int = 0
    closing: bool = False
    pins: PinnedSteps = field(default_factory=PinnedSteps)
