"""What the leader of a run reports to the operator, and the answer: JSON over HTTPS, on Kubernetes
only.

The leader is the sidecar of node rank 0. It posts a `RunReport` every `LeaderAnswer.interval_s`,
and at once when one of `doubts`, `alarms` or `recent` changes. A report is level-triggered and
whole, so a lost or repeated one changes nothing. It names no namespace and no run: the operator
takes these from its own record of the pod whose token came with the report.

A body has at most `LARGEST_BYTES`. The leader cuts each list and text to the bound that is named
here (`cut_to_bounds`); the operator refuses a report with a longer list.
"""

from __future__ import annotations

import calendar
import time
from dataclasses import dataclass, field, replace

from keepstep.core.retention import Retention
from keepstep.steps import Epoch, StepId, StrEnum, Tier

PATH = "/v1/runs"
LARGEST_BYTES = 128 << 10

MOST_NODES = 64
MOST_NODE_WARNINGS = 2
MOST_MESSAGES = 12
MOST_RECENT = 10
MOST_EPOCHS = 4
MOST_COMMITS = 16
MOST_KEPT = 132
"""The newest 100 archived steps, and 32 pins."""
MOST_SOLE = 32
MOST_HOLDERS = 200
MOST_DRIVES = 128
MOST_TALLIES = 8
LONGEST_WARNING = 160
LONGEST_TEXT = 500


def format_utc(seconds: float) -> str:
    """Unix seconds as RFC 3339 text with whole seconds, as the API server writes times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def parse_utc(written: str) -> float | None:
    """Inverse of `format_utc`; None for text that is not a time."""
    try:
        return float(calendar.timegm(time.strptime(written, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


# --- the record: kept by the operator for the leader ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadputSeconds:
    """Whole seconds by bucket, as `keepstep.core.history.Badput`."""

    training_prep: int = 0
    program_startup: int = 0
    checkpoint_save: int = 0
    checkpoint_restore: int = 0
    wasted_progress: int = 0
    infrastructure_recovery: int = 0


@dataclass(frozen=True, kw_only=True)
class GoodputTally:
    """One tally of the run's goodput, as one sidecar counted it. Times as `format_utc` writes
    them."""

    id: str
    since: str
    until: str
    productive_seconds: int = 0
    badput_seconds: BadputSeconds = BadputSeconds()
    epoch: str = ""
    step: int = -1
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class RunGoodput:
    """Goodput of the run from `since` until `until`. `ratio`: as text, with three places. `step`:
    the newest step that was counted. `steps`: the steps that no restore went back over. `tallies`:
    what the sum is made from."""

    since: str
    until: str
    ratio: str
    wall_seconds: int
    productive_seconds: int
    badput_seconds: BadputSeconds = BadputSeconds()
    step: int = -1
    steps: int = 0
    tallies: tuple[GoodputTally, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeHoldings:
    """What the drives of a node hold and what outlives its pods. `node_ranks`, `copies`: the node
    ranks whose own shards, or copies of whose shards, these are. `step`: the newest step of
    them."""

    node: str
    node_ranks: str = ""
    copies: str = ""
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReportedDrive:
    """The file system on which one volume of a node rank lies on its node. `id`: as
    `ReportedVolume.drive_id`."""

    node_rank: int
    node: str
    volume: str
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class RestoreFromState:
    """The state of `LeaderAnswer.restore_from`. `asked`: its value when it was last read. `run`:
    the run that it names, if that is another one. `step`: the step that it means; '' while none is
    found. `epoch`: the epoch that began from `step`; '' if none has. `since`: the number of the
    newest epoch when it was asked."""

    asked: str
    run: str = ""
    step: str = ""
    epoch: str = ""
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class LeaderRecord:
    """What a leader knows of the run and cannot find again on any tier. The operator keeps it
    unread, shows it, and gives it back to a leader that begins. `counted`: the newest epoch whose
    restart is in `restarts`."""

    restarts: int = 0
    lost_steps: int = 0
    counted: str = ""
    goodput: RunGoodput | None = None
    holders: tuple[NodeHoldings, ...] = ()
    drives: tuple[ReportedDrive, ...] = ()
    restore_from: RestoreFromState | None = None


# --- the report ----------------------------------------------------------------------------------


class MemberState(StrEnum):
    """A node rank as the leader sees it. `SILENT`: not connected for 90 s. `GONE`: its pod is gone
    with what its memory held."""

    CONNECTED = "connected"
    SILENT = "silent"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One node rank. `pod`: the UID of its newest pod. `ranks`, `buddies`: as `0-3,8`. `memory`,
    `local`: the newest step that all its ranks hold there. `warnings`: at most
    `MOST_NODE_WARNINGS`."""

    node_rank: int
    pod: str
    node: str
    state: MemberState = MemberState.CONNECTED
    ranks: str = ""
    memory: int | None = None
    local: int | None = None
    buddies: str = ""
    warnings: tuple[str, ...] = ()


class AdvisoryKind(StrEnum):
    """What the leader alone can see, and a condition of the run shows. docs/troubleshoot.md has the
    conditions."""

    COMMIT_STALLED = "CommitStalled"
    COMMIT_LOST = "CommitLost"
    SIDECAR_TROUBLED = "SidecarTroubled"
    RESTORE_REFUSED = "RestoreRefused"
    NOTHING_KEPT = "NothingKept"
    PART_GONE = "PartGone"
    PEERS_TROUBLED = "PeersTroubled"
    PEERS_BEHIND = "PeersBehind"
    PEERS_NOT_SERVING = "PeersNotServing"
    ARCHIVE_TROUBLED = "ArchiveTroubled"
    ARCHIVE_BEHIND = "ArchiveBehind"
    LEFT_NOT_SERVED = "LeftNotServed"
    LEFT_SERVED = "LeftServed"
    RANKS_ABSENT = "RanksAbsent"


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """Something that holds now. `text`: a sentence for people, without numbers that change with
    each report."""

    kind: AdvisoryKind
    text: str


@dataclass(frozen=True, kw_only=True)
class ReportedAlarm:
    """Something that a person should look at, said for an hour. `kind`: an Event's reason."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened. `time`: as `format_utc` writes it. `type`: an Event's reason, for
    example Restored, FreshStart, Forked, RolledBack, LastStepLost, OtherDrive. `tier`: the farthest
    tier that a restart needed."""

    time: str
    type: str
    message: str = ""
    step: int | None = None
    tier: str = ""
    seconds: float | None = None
    lost_steps: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStep:
    """An archived or pinned step. `step`: its full id, as text, because an operator holds a hundred
    thousand. `tiers`: those that hold all its shards. `size_bytes`: of one copy; 0 if it is
    unknown."""

    step: str
    ranks: int
    tiers: tuple[Tier, ...]
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LossOutcome:
    """What a loss would leave. `restart`: the step that a restart of a container goes on from now;
    None: there is none. `node`: the step that a restart goes on from at the least, whichever node
    is lost; it may be the archived one. `pod`: the same for any one pod with its volumes.
    `archived`: the newest archived step. `sole`: the nodes that hold the only copy of some part of
    the newest commit."""

    restart: StepId | None = None
    node: StepId | None = None
    pod: StepId | None = None
    archived: StepId | None = None
    sole: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SaveOverhead:
    """What saving cost, summed over ranks since their sidecars started."""

    skipped: int = 0
    discarded: int = 0
    blocked_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """POST /v1/runs.

    `leader`: made by the leader's process when it begins; `sequence` grows with each report of it.
    The first one asks for the record. `world`, `alive`: ranks, and those that a trainer serves now.
    `known`: how many node ranks have reported to the leader; `missing`: those that do not report
    now although a pod of theirs is there; `without_library`: those to whose sidecar no trainer has
    come. `settled`: all members have reported, so what is not named does not exist. `epochs`: the
    newest ones, newest first. `fresh`: the epoch that began at step 0 beside older steps; '' for
    none. `step`: the newest step that all ranks staged. `behind`: how many steps it is ahead of the
    commit. `committed`: the newest commit. `commits`: the newest few. `held_by`: the tiers that
    hold `committed` of all ranks. `kept`: newest first; `certain`: no other step is kept.
    `archived`: how many steps are. `fullest`: the largest part of a volume that is used, 0 to 1.
    `refusals`: how often the ranks' vote refused since the last restore. `restore_known`: all
    members know the step of `LeaderAnswer.restore_from`. `acknowledged`: the epoch that
    `LeaderAnswer.fresh_start` meant, once that is known. `nodes`: those with warnings, then by node
    rank. `recent`: newest first.
    """

    leader: str
    sequence: int
    world: int = 0
    alive: int = 0
    known: int = 0
    missing: str = ""
    without_library: str = ""
    settled: bool = False
    epochs: tuple[Epoch, ...] = ()
    fresh: str = ""
    origin: str = ""
    step: int | None = None
    behind: int | None = None
    committed: StepId | None = None
    commits: tuple[StepId, ...] = ()
    watermarks: dict[Tier, StepId] = field(default_factory=dict)
    held_by: tuple[Tier, ...] = ()
    kept: tuple[KeptStep, ...] = ()
    certain: bool = False
    archived: int = 0
    safe: LossOutcome = LossOutcome()
    stall: SaveOverhead = SaveOverhead()
    fullest: float | None = None
    sidecar: str = ""
    library: str = ""
    pinned: str = ""
    refusals: int = 0
    restore_known: bool = False
    acknowledged: str = ""
    nodes: tuple[NodeReport, ...] = ()
    recent: tuple[RunEvent, ...] = ()
    alarms: tuple[ReportedAlarm, ...] = ()
    doubts: tuple[Advisory, ...] = ()
    record: LeaderRecord = LeaderRecord()


def cut_to_bounds(report: RunReport) -> RunReport:
    """The report with its lists and texts cut to their bounds, as a leader sends it. The first
    items of a list stay, but of commits and tallies, which are oldest first, the last ones."""
    record, goodput = report.record, report.record.goodput
    if goodput is not None:
        goodput = replace(goodput, tallies=goodput.tallies[-MOST_TALLIES:])
    return replace(
        report,
        epochs=report.epochs[:MOST_EPOCHS],
        commits=report.commits[-MOST_COMMITS:],
        kept=report.kept[:MOST_KEPT],
        safe=replace(report.safe, sole=report.safe.sole[:MOST_SOLE]),
        nodes=tuple(_cut(node) for node in report.nodes[:MOST_NODES]),
        recent=tuple(
            replace(event, message=event.message[:LONGEST_TEXT])
            for event in report.recent[:MOST_RECENT]
        ),
        alarms=tuple(
            replace(alarm, text=alarm.text[:LONGEST_TEXT])
            for alarm in report.alarms[:MOST_MESSAGES]
        ),
        doubts=tuple(
            replace(doubt, text=doubt.text[:LONGEST_TEXT])
            for doubt in report.doubts[:MOST_MESSAGES]
        ),
        record=replace(
            record,
            goodput=goodput,
            holders=record.holders[:MOST_HOLDERS],
            drives=record.drives[:MOST_DRIVES],
        ),
    )


def _cut(node: NodeReport) -> NodeReport:
    warnings = (text[:LONGEST_WARNING] for text in node.warnings[:MOST_NODE_WARNINGS])
    return replace(node, warnings=tuple(warnings))


# --- the answer ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MemberPod:
    """A pod of the run that exists and has a node. `pod`: its UID. `address`: its IP, '' while it
    has none. `domain`: the value of the policy's topologyKey on its node. `leaving`: it is being
    deleted. `over`: its containers do not run again."""

    node_rank: int
    pod: str
    name: str
    node: str
    address: str = ""
    domain: str = ""
    leaving: bool = False
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    """What the leader goes by. `outlives_pod`: all volumes outlive their pod. `replicas`: 0 without
    peers. `archive_every`: None without an archive. `restarts`: the run begins again where a part
    of every step is gone for good (`onLoss: Restart`)."""

    keep: Retention
    outlives_pod: bool
    replicas: int = 0
    persist_every: int | None = None
    archive_every: int | None = None
    restarts: bool = True


@dataclass(frozen=True, kw_only=True)
class LeaderAnswer:
    """The answer to a report.

    `members`: the pods of the run. `complete`: these are all that exist, so a pod that is neither
    named nor connected is gone for good. Otherwise it may only be unknown to an operator that has
    just begun. `lost_nodes`: nodes on which the run has something by its record, and which exist no
    more. `policy`: None while it is unknown; the leader then goes by what its own pod was given.
    `pins`: steps that stay. `restore_from`: `spec.restoreFrom` as it is written. `fresh_start`: the
    annotation as it is written (`newest`, `allow`, or an epoch). `paused`: retire nothing, plan no
    restore. `agents`: the addresses of agents by node, '' while one is not ready. `authorities`:
    PEM of all by which the operator is recognized; '': no change. `record`: only in the answer to
    the first report of a leader.
    """

    interval_s: float = 30.0
    members: tuple[MemberPod, ...] = ()
    complete: bool = False
    lost_nodes: tuple[str, ...] = ()
    policy: RunPolicy | None = None
    pins: tuple[StepId, ...] = ()
    restore_from: str = ""
    fresh_start: str = ""
    paused: bool = False
    agents: dict[str, str] = field(default_factory=dict)
    authorities: str = ""
    record: LeaderRecord | None = None
