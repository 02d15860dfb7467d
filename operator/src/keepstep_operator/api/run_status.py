"""CheckpointRun.status as types, both to write and to read what an earlier reconciler wrote.

Fields are named as in crds/keepstep.dev_checkpointruns.yaml (camelCase there). Empty fields are
left out. Reading is lenient: a status that does not fit counts as none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from keepstep.wire.run_reports import (
    LeaderRecord,
    NodeHoldings,
    ReportedDrive,
    RestoreFromState,
    RunEvent,
    RunGoodput,
    SaveOverhead,
)
from keepstep_operator.text_sanitizing import replace_unprintable

MOST_WARNINGS = 10
LONGEST_TEXT = 1000


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The root job."""

    api_version: str
    kind: str
    name: str
    uid: str = ""


@dataclass(frozen=True, kw_only=True)
class PolicyStatus:
    """The policy that the run goes by."""

    name: str
    generation: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CommittedStatus:
    """The newest committed step. `time`: when it was first seen, by the reconciler's clock."""

    step: int
    id: str
    time: str


@dataclass(frozen=True, kw_only=True)
class RankMemoryStatus:
    """The slots of a rank."""

    slots: int = 0


@dataclass(frozen=True, kw_only=True)
class PodStepStatus:
    """One pod and the newest steps that all of its ranks hold."""

    node_rank: int
    node: str = ""
    pod: str = ""
    ranks: str = ""
    memory: int | None = None
    local: int | None = None
    buddies: str = ""


@dataclass(frozen=True, kw_only=True)
class SidecarVersionStatus:
    """The sidecar of the oldest pod. Pods that join the existing ones get it, and `policy`."""

    image: str
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A Kubernetes condition."""

    type: str
    status: str
    reason: str
    message: str
    observed_generation: int = 0
    last_transition_time: str = ""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """CheckpointRun.status, whole."""

    observed_generation: int = 0
    phase: str = "Waiting"
    job: JobStatus | None = None
    job_name: str = ""
    policy: PolicyStatus | None = None
    start: SidecarVersionStatus | None = None
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
    watermarks: Mapping[str, str] = field(default_factory=dict)
    tiers: str = ""
    nodes_summary: str = ""
    survives: tuple[str, ...] = ()
    survives_summary: str = ""
    protected: str = "Unknown"
    pinned: str = ""
    memory: RankMemoryStatus | None = None
    stall: SaveOverhead | None = None
    restarts: int = 0
    lost_steps: int = 0
    goodput: RunGoodput | None = None
    recent: tuple[RunEvent, ...] = ()
    ranks: tuple[PodStepStatus, ...] = ()
    holders: tuple[NodeHoldings, ...] = ()
    drives: tuple[ReportedDrive, ...] = ()
    restore_from: RestoreFromState | None = None
    warnings: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @property
    def record(self) -> LeaderRecord:
        """What the leader asked to keep."""
        return LeaderRecord(
            restarts=self.restarts,
            lost_steps=self.lost_steps,
            counted=self.epoch,
            goodput=self.goodput,
            holders=self.holders,
            drives=self.drives,
            restore_from=self.restore_from,
        )


def status_json(status: RunStatus) -> dict[str, Any]:
    """The status as the API server takes it."""
    body: dict[str, Any] = _renamed(msgspec.to_builtins(status), _camel)
    if status.policy is not None:  # what a user wrote stays as it is
        body["policy"]["spec"] = dict(status.policy.spec)
    return body


def read_status(body: Mapping[str, Any]) -> RunStatus:
    """Read a status; an empty one if it cannot be read."""
    try:
        status = msgspec.convert(_renamed(dict(body), _snake), RunStatus, strict=False)
        if status.policy is None:
            return status
        return replace(status, policy=replace(status.policy, spec=body["policy"].get("spec") or {}))
    except (msgspec.ValidationError, AttributeError):
        return RunStatus()


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """The same with other names of fields, and without the empty ones: None, texts and lists."""
    if isinstance(value, dict):
        known = {rename(name): _renamed(value, rename) for name, value in value.items()}
        return {name: value for name, value in known.items() if value not in (None, "", [], {})}
    return [_renamed(item, rename) for item in value] if isinstance(value, list | tuple) else value


def _camel(name: str) -> str:
    first, *more = name.split("_")
    return first + "".join(map(str.capitalize, more))


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name)


def cut_text(text: str, *, longest: int = LONGEST_TEXT) -> str:
    """At most `longest` characters of a text that others wrote, on one line, without what a
    terminal would obey."""
    line = replace_unprintable(" ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 3] + "..."
