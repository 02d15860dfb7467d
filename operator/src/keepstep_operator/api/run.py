"""CheckpointRun.status as types, both to write and to read what an earlier reconciler wrote.

Fields are named as in crds/keepstep.dev_checkpointruns.yaml (camelCase there). Fields with their
default are left out. Reading is lenient: a status that does not fit counts as none.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from keepstep_operator.printing import printable

MOST_RECENT = 10
MOST_RANKS = 64
MOST_HOLDERS = 1024
MOST_WARNINGS = 10
LONGEST_TEXT = 1000


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The root job."""

    api_version: str
    kind: str
    name: str
    uid: str


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The policy that the run goes by."""

    name: str
    generation: int = 0
    spec: dict[str, Any] = {}


class CommittedStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """The newest committed step. `time`: when it was first seen, by the reconciler's clock."""

    step: int
    id: str
    time: str


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The slots of a rank."""

    slots: int = 0


class StallStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What saving cost, summed over ranks since their sidecars started."""

    skipped: int = 0
    discarded: int = 0
    blocked_seconds: float = 0.0


class BadputStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Seconds by bucket, as `keepstep.core.history.Badput`."""

    training_prep: int = 0
    program_startup: int = 0
    checkpoint_save: int = 0
    checkpoint_restore: int = 0
    wasted_progress: int = 0
    infrastructure_recovery: int = 0


class TallyStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One tally of the run's goodput, as a sidecar last reported it."""

    id: str
    since: str
    until: str
    productive_seconds: int = 0
    badput_seconds: BadputStatus = BadputStatus()
    epoch: str = ""
    step: int = -1
    steps: int = 0


class GoodputStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Goodput of the run from `since` until `until`. `ratio`: as text, with three places. `step`:
    the newest step that was counted. `steps`: the steps that no restore went back over. `tallies`:
    what the sum is made from, so that the next reconciler adds only what is new."""

    since: str
    until: str
    ratio: str
    wall_seconds: int
    productive_seconds: int
    badput_seconds: BadputStatus = BadputStatus()
    step: int = -1
    steps: int = 0
    tallies: list[TallyStatus] = []


class RecentStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Something that happened to the run. The list has the newest first."""

    time: str
    type: str
    step: int | None = None
    tier: str = ""
    seconds: float | None = None
    lost_steps: int | None = None
    message: str = ""


class PlaceStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One pod and the newest steps that all of its ranks hold."""

    node_rank: int
    node: str = ""
    pod: str = ""
    ranks: str = ""
    memory: int | None = None
    local: int | None = None
    buddies: str = ""


class HolderStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What the drives of a node hold and what outlives its pods. `node_ranks`, `copies`: the node
    ranks whose own shards, or copies of whose shards, these are. `step`: the newest step of
    them."""

    node: str
    node_ranks: str = ""
    copies: str = ""
    step: int | None = None


class DriveStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The file system on which one volume of one place lies on its node. `id`: as
    `ReportedVolume.drive_id`."""

    node_rank: int
    node: str
    volume: str
    id: str = ""


class RestoreFromStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """The state of spec.restoreFrom. `asked`: its value when it was last read. `epoch`: the epoch
    that began from `step`; '' if none has. `since`: the number of the newest epoch when it was
    asked."""

    asked: str
    run: str = ""
    step: str = ""
    epoch: str = ""
    since: int = 0


class StartStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The sidecar of the oldest pod. Pods that join the existing ones get it, and `policy`."""

    image: str
    version: str = ""


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A Kubernetes condition."""

    type: str
    status: str
    reason: str
    message: str
    observed_generation: int = 0
    last_transition_time: str = ""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """CheckpointRun.status, whole."""

    observed_generation: int = 0
    phase: str = "Waiting"
    job: JobStatus | None = None
    job_name: str = ""
    policy: PolicyStatus | None = None
    start: StartStatus | None = None
    sidecar_image: str = ""
    sidecar_version: str = ""
    library_version: str = ""
    world: int = 0
    nodes: int = 0
    epoch: str = ""
    origin: str = ""
    step: int | None = None
    committed: CommittedStatus | None = None
    behind: int | None = None
    watermarks: dict[str, str] = {}
    tiers: str = ""
    nodes_summary: str = ""
    survives: list[str] = []
    survives_summary: str = ""
    protected: str = "Unknown"
    pinned: str = ""
    memory: MemoryStatus | None = None
    stall: StallStatus | None = None
    restarts: int = 0
    lost_steps: int = 0
    goodput: GoodputStatus | None = None
    recent: list[RecentStatus] = []
    ranks: list[PlaceStatus] = []
    holders: list[HolderStatus] = []
    drives: list[DriveStatus] = []
    restore_from: RestoreFromStatus | None = None
    warnings: list[str] = []
    conditions: list[Condition] = []


_ALWAYS = ("phase", "protected", "restarts", "lostSteps", "world", "nodes")
"""Fields that are shown even with their default, because an empty column looks like a fault."""


def as_json(status: RunStatus) -> dict[str, Any]:
    """The status as the API server takes it."""
    body: dict[str, Any] = msgspec.to_builtins(status)
    defaults = RunStatus()
    for name in _ALWAYS:
        attribute = "lost_steps" if name == "lostSteps" else name
        body.setdefault(name, getattr(defaults, attribute))
    return body


def read_status(body: Mapping[str, Any]) -> RunStatus:
    """Read a status; an empty one if it cannot be read."""
    try:
        return msgspec.convert(dict(body), RunStatus, strict=False)
    except msgspec.ValidationError:
        return RunStatus()


def utc(seconds: float) -> str:
    """The time in RFC 3339 with whole seconds, as the API server writes times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def seconds_of(written: str) -> float | None:
    """Inverse of `utc`; None for text that is not a time."""
    try:
        return float(calendar.timegm(time.strptime(written, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


def cut(text: str, *, longest: int = LONGEST_TEXT) -> str:
    """At most `longest` characters of a text that others wrote, on one line, without what a
    terminal would obey."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 3] + "..."
