"""What is known of each kind of job: where it is served, which of its containers trains, and what
tells its pods apart. docs/support-matrix.md has the same table for people.

Jobs of other kinds are not looked up, and their pods get no node rank by themselves.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final


class RankSource(enum.Enum):
    """What tells a pod's node rank. `NONE`: the job has one pod, of node rank 0."""

    NONE = "one pod"
    COMPLETION_INDEX = "completion index"
    JOBSET = "index of the job in its set, and completion index"
    GROUPED = "index of the group, and of the pod in it"
    REPLICATED = "index of the replica in its worker group, and of the host in it"
    WRITTEN = "RANK, else a label of its controller"
    LABEL = "a label of its controller"


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """A kind of job. `container`: the one that trains; '' for the first. `label`: the label with
    each pod's index, if `rank` is `LABEL` or `WRITTEN`. `owner`: (group, kind) of the object that
    may own the job and is the root then. `templated`: a queue admits the job by its template, so it
    does not count what is added to its pods."""

    group: str
    kind: str
    plural: str
    rank: RankSource
    container: str = ""
    label: str = ""
    owner: tuple[str, str] | None = None
    templated: bool = True


_KINDS: Final = (
    JobKind(group="", kind="Pod", plural="pods", rank=RankSource.NONE, templated=False),
    JobKind(group="batch", kind="Job", plural="jobs", rank=RankSource.COMPLETION_INDEX),
    JobKind(
        group="kubeflow.org",
        kind="PyTorchJob",
        plural="pytorchjobs",
        rank=RankSource.WRITTEN,
        container="pytorch",
        label="training.kubeflow.org/replica-index",
    ),
    JobKind(
        group="jobset.x-k8s.io",
        kind="JobSet",
        plural="jobsets",
        rank=RankSource.JOBSET,
        owner=("trainer.kubeflow.org", "TrainJob"),
    ),
    JobKind(
        group="trainer.kubeflow.org",
        kind="TrainJob",
        plural="trainjobs",
        rank=RankSource.JOBSET,
        container="node",
    ),
    JobKind(
        group="apps",
        kind="StatefulSet",
        plural="statefulsets",
        rank=RankSource.LABEL,
        label="apps.kubernetes.io/pod-index",
        templated=False,
    ),
    JobKind(
        group="leaderworkerset.x-k8s.io",
        kind="LeaderWorkerSet",
        plural="leaderworkersets",
        rank=RankSource.GROUPED,
        templated=False,
    ),
    JobKind(
        group="kubeflow.org",
        kind="MPIJob",
        plural="mpijobs",
        rank=RankSource.LABEL,
        label="training.kubeflow.org/replica-index",
    ),
    JobKind(
        group="ray.io",
        kind="RayCluster",
        plural="rayclusters",
        rank=RankSource.REPLICATED,
        owner=("ray.io", "RayJob"),
    ),
    JobKind(group="ray.io", kind="RayJob", plural="rayjobs", rank=RankSource.REPLICATED),
    JobKind(
        group="batch.volcano.sh",
        kind="Job",
        plural="jobs",
        rank=RankSource.WRITTEN,
        label="volcano.sh/task-index",
    ),
)
_BY_NAME: Final = {(kind.group, kind.kind): kind for kind in _KINDS}
_VERSION = re.compile(r"v[0-9][a-z0-9]{0,20}")
NAME: Final = r"(?!.*\.\.)[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
"""Pattern of an object's name."""
_NAME = re.compile(NAME)


def kind_of(api_version: str, kind: str) -> JobKind | None:
    """The kind of an owner, in any version; None for an unknown kind."""
    group, _, version = api_version.rpartition("/")
    return _BY_NAME.get((group, kind)) if _VERSION.fullmatch(version) else None


def is_object_name(text: str) -> bool:
    """Whether an object can have this name."""
    return _NAME.fullmatch(text) is not None
