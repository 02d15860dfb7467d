"""What the reconciler knows of the cluster's objects: small values, parsed once at the edge."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from keepstep_operator.api.job_kinds import NAME
from keepstep_operator.api.policy import Policy, VolumeKind


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """A run: the namespace is the boundary of trust, `name` is that of its CheckpointRun."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def _form(pattern: str) -> msgspec.Meta:
    return msgspec.Meta(pattern=rf"\A(?:{pattern})\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The root owner of a run's pods: what people look at, and where events go. `name` and `uid`:
    '' for a pod without an owner, its own root, that is not created yet.

    The forms, and the bounds of CheckpointRun.status.job, hold where msgspec reads one (`job_of`).
    """

    api_version: Annotated[str, _form(r"([a-z0-9][-a-z0-9.]{0,252}/)?[a-z0-9]{1,62}")]
    kind: Annotated[str, _form(r"[A-Za-z][-A-Za-z0-9]{0,62}")]
    name: Annotated[str, _form(f"({NAME})?")]
    uid: Annotated[str, _form(r"[-.:_A-Za-z0-9]{0,63}")] = ""


def job_of(**fields: object) -> Job | None:
    """What others wrote as a job; None where no object can be that."""
    try:
        return msgspec.convert(fields, Job)
    except msgspec.ValidationError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod that asked for keepstep. `injected` False: it was admitted without a sidecar.

    `training`: the training container runs now. `restarts`: of the training container, in place.
    `trouble`: why the pod does not run as it should, in the kubelet's or scheduler's words.
    `labelled`: the run's name comes from the user's label, so it outlives the job. `queued`: a
    queue (Kueue, Volcano) has it in hand. `uncounted`: and admitted its job by the template.
    """

    uid: str
    namespace: str
    name: str
    injected: bool
    run: RunKey
    node_rank: int = 0
    node: str = ""
    phase: str = "Pending"
    created_at: str = ""
    training: bool = False
    restarts: int = 0
    trouble: str = ""
    volumes: tuple[VolumeKind, ...] = ()
    host_paths: tuple[str, ...] = ()
    policy: str = ""
    policy_generation: int = 0
    sidecar_image: str = ""
    sidecar_version: str = ""
    sidecar_contract: int = 0
    labelled: bool = False
    queued: bool = False
    uncounted: bool = False
    job: Job | None = None
    deleting: bool = False

    @property
    def over(self) -> bool:
        """It will never run again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def stays(self) -> bool:
        """It has the sidecar, and is neither over nor being deleted: its place is its own."""
        return self.injected and not self.over and not self.deleting


@dataclass(frozen=True, kw_only=True)
class PolicyRecord:
    """A CheckpointPolicy as it lies in the cluster. `policy`: what it says, None where it is not
    accepted, and `problem` has (reason, message). `advice`: what an accepted one does not give."""

    namespace: str
    name: str
    generation: int
    uid: str = ""
    policy: Policy | None = None
    problem: tuple[str, str] | None = None
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node. `cordoned`: no new pod comes to it; it is probably being drained. `ready`: its
    kubelet says that it works."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    cordoned: bool = False
    ready: bool = True


@dataclass(frozen=True, kw_only=True)
class RunObject:
    """A CheckpointRun as it lies in the cluster. `version`: its resourceVersion. `status` is ours,
    from an earlier life maybe; `policy`: the snapshot in it."""

    key: RunKey
    uid: str
    version: str = ""
    generation: int = 1
    pins: tuple[str, ...] = ()
    restore_from: str = ""
    paused: bool = False
    fresh_start: str = ""
    policy: Policy | None = None
    status: Mapping[str, Any] = field(default_factory=dict)


class JobState(str, enum.Enum):
    """What a look at the root job says. `UNKNOWN`: it is of a kind that may not be read, or is
    not served."""

    ACTIVE = "active"
    UNKNOWN = "unknown"
    FINISHED = "finished"
    FAILED = "failed"
    GONE = "gone"

    def __str__(self) -> str:
        return self.value
