"""What the reconciler knows of the cluster's objects: small values, each parsed once on arrival."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from keepstep_operator.api.job_kinds import NAME
from keepstep_operator.api.policy import Policy, VolumeKind
from keepstep_operator.api.run_status import RunStatus


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """The key of a run. `namespace` is the boundary of trust; `name` is also its
    CheckpointRun's."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def _form(pattern: str) -> msgspec.Meta:
    return msgspec.Meta(pattern=rf"\A(?:{pattern})\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The root owner of a run's pods. People look at it, and events go to it. `name` and `uid`: ''
    for a pod without an owner, its own root, that is not created yet.

    The patterns, and the bounds of CheckpointRun.status.job, are checked only where msgspec decodes
    a job (`build_job`).
    """

    api_version: Annotated[str, _form(r"([a-z0-9][-a-z0-9.]{0,252}/)?[a-z0-9]{1,62}")]
    kind: Annotated[str, _form(r"[A-Za-z][-A-Za-z0-9]{0,62}")]
    name: Annotated[str, _form(f"({NAME})?")]
    uid: Annotated[str, _form(r"[-.:_A-Za-z0-9]{0,63}")] = ""


def build_job(**fields: object) -> Job | None:
    """The job with these fields, which others wrote; None if no object can have them."""
    try:
        return msgspec.convert(fields, Job)
    except msgspec.ValidationError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod that asked for keepstep. `injected` False: it was admitted without a sidecar.

    `training_since`: when the running training container started, in unix seconds; None: it does
    not run. `address`: the pod's IP; '' while it has none.
    `trouble`: why the pod does not run as it should, in the words of the kubelet or the scheduler;
    without a sidecar, in those of admission. `warnings`: what injection did otherwise than asked.
    `labelled`: the run's name comes from the user's
    label, so the run outlives the job. `uncounted`: a queue admitted its job by the template.
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
    address: str = ""
    training_since: float | None = None
    trouble: str = ""
    warnings: tuple[str, ...] = ()
    volumes: tuple[VolumeKind, ...] = ()
    policy: str = ""
    policy_generation: int = 0
    sidecar_image: str = ""
    sidecar_version: str = ""
    labelled: bool = False
    uncounted: bool = False
    job: Job | None = None
    deleting: bool = False

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_active(self) -> bool:
        """Whether it has the sidecar, and is neither over nor being deleted: it holds its place."""
        return self.injected and not self.over and not self.deleting


@dataclass(frozen=True, kw_only=True)
class PolicyRecord:
    """A CheckpointPolicy as it is in the cluster. `policy`: its content; None if it is not
    accepted. `problem` then has (reason, message). `advice`: what an accepted policy protects
    against and what not."""

    namespace: str
    name: str
    generation: int
    uid: str = ""
    policy: Policy | None = None
    problem: tuple[str, str] | None = None
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """The agent of a node, which serves what runs left there. `address`: '' while it does not."""

    uid: str
    node: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node. `cordoned`: it takes no new pods and is probably being drained. `ready`: its kubelet
    reports that it works."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    cordoned: bool = False
    ready: bool = True


@dataclass(frozen=True, kw_only=True)
class RunObject:
    """A CheckpointRun as it is in the cluster. `status`: ours, maybe from an earlier reconciler.
    `policy`: the snapshot in the status."""

    key: RunKey
    uid: str
    generation: int = 1
    pins: tuple[str, ...] = ()
    restore_from: str = ""
    paused: bool = False
    fresh_start: str = ""
    policy: Policy | None = None
    status: RunStatus = field(default_factory=RunStatus)


class JobState(enum.StrEnum):
    """The state of the root job. `UNKNOWN`: we may not read its kind, or it is not served."""

    ACTIVE = "active"
    UNKNOWN = "unknown"
    FINISHED = "finished"
    FAILED = "failed"
    GONE = "gone"
