"""A pod as small values: which run it belongs to, its place there, and which container trains.

Admission sees a pod before it has a uid (and, with a generateName, before it has a name); reconcile
sees it later. Both must come to the same answers. So everything here depends only on what a pod has
from its creation: labels, annotations, owner, containers. After injection, the labels that
admission wrote count (`parse_run_placement`). Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec

from keepstep.errors import UsageError
from keepstep_operator import names
from keepstep_operator.api.cluster_objects import Job, build_job
from keepstep_operator.api.job_kinds import JobKind, RankSource, kind_of
from keepstep_operator.object_body import Body

JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOBSET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
JOBSET_INDEX_LABEL = "jobset.sigs.k8s.io/job-global-index"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation of every pod of an Indexed Job; since Kubernetes 1.28 also a label."""
TRAINJOB_LABELS = (
    "trainer.kubeflow.org/trainjob-name",
    "trainer.kubeflow.org/trainjob-ancestor-step",
)

LWS_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
LWS_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
RAY_REPLICA_LABEL = "ray.io/worker-group-replica-index"
RAY_HOST_LABEL = "ray.io/replica-host-index"
"""Only where a replica has several hosts."""
_TRAINJOB_CONTAINER = "node"

_KUEUE = "kueue.x-k8s.io/"
"""Kueue labels the pods of a job that it admitted (podset, or queue-name)."""

PODS_OF_A_JOB = 10_000
"""How many node ranks each job of a JobSet has: a node rank is the job's global index times this,
plus the completion index. Each group of a LeaderWorkerSet, and each replica of a RayCluster, has as
many. A node rank identifies a pod within the run; it is not torch's RANK."""

_LONGEST_KEY = 63
_HEX_OF_UID = 8
_DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


class PodRefusedError(UsageError):
    """A pod that cannot be part of a run. `reason` is one word; the message says what to change."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container. `literals`: its environment variables with a literal value (no references)."""

    name: str
    image: str
    literals: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The parts of a pod that we use. `owner`: the controller's reference. `init_containers`: their
    names, in order."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    owner: Job | None
    containers: tuple[Container, ...]
    init_containers: tuple[str, ...]
    node: str = ""
    phase: str = ""
    deleting: bool = False

    @property
    def policy(self) -> str | None:
        """The CheckpointPolicy that the pod asks for; None: it asks for none."""
        return self.annotations.get(names.POLICY_ANNOTATION)

    @property
    def restore_from(self) -> str | None:
        """The step of another run that the pod's run begins from; None: it does not fork."""
        return self.annotations.get(names.RESTORE_FROM_ANNOTATION)

    @property
    def has_sidecar(self) -> bool:
        """Whether the pod really has the sidecar, whatever its labels say."""
        return names.SIDECAR_CONTAINER in self.init_containers


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A pod's place: its run's key (the name of its directory and its CheckpointRun) and its node
    rank."""

    run_key: str
    node_rank: int


_Word = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{0,128}\Z")]
_Image = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{0,1024}\Z")]
_Generation = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@dataclass(frozen=True, kw_only=True)
class Injected:
    """The annotation keepstep.dev/status: what admission did to the pod, or why it did nothing.

    `reason`: '' if the sidecar was injected; otherwise one word, and `message` says what to do.
    `job`: None if refused. `image`, `version`: of the sidecar. `warnings`: what was done otherwise
    than asked. `ranked`: the pod asked for its node rank by label.

    The types are checked on reading, because anybody who may write pods may have written the
    annotation. `policy`, `message` and `warnings` may be any text.
    """

    policy: str
    reason: _Word = ""
    message: str = ""
    generation: _Generation = 0
    image: _Image = ""
    version: _Word = ""
    container: _Word = ""
    job: Job | None = None
    warnings: tuple[str, ...] = ()
    ranked: bool = False

    def render(self) -> str:
        """The annotation's value: JSON without empty fields, keys in a fixed order."""
        fields = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(fields, separators=(",", ":"))


_INJECTED = msgspec.json.Decoder(Injected)


def parse_pod(body: Body, *, namespace: str = "") -> Pod:
    """Parse a Pod object. `namespace`: the admission request's, since a new pod's may be empty."""
    metadata, spec = body.get("metadata") or {}, body.get("spec") or {}
    status = body.get("status") or {}
    return Pod(
        namespace=metadata.get("namespace") or namespace,
        name=metadata.get("name") or "",
        uid=metadata.get("uid") or "",
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        owner=controller_of(metadata.get("ownerReferences") or []),
        containers=tuple(_container(container) for container in spec.get("containers") or []),
        init_containers=tuple(
            container.get("name", "") for container in spec.get("initContainers") or []
        ),
        node=spec.get("nodeName") or "",
        phase=status.get("phase") or "",
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def find_root_job(pod: Pod) -> Job:
    """The job that the pod belongs to: a JobSet or a LeaderWorkerSet by the pod's labels, else its
    controller, else the pod itself."""
    if name := pod.labels.get(JOBSET_NAME_LABEL):
        version, uid = "jobset.x-k8s.io/v1alpha2", pod.labels.get(JOBSET_UID_LABEL, "")  # from 0.9
        if job := build_job(api_version=version, kind="JobSet", name=name, uid=uid):
            return job
    if pod.owner is not None and (name := pod.labels.get(LWS_NAME_LABEL)):
        # it has many StatefulSets, and no label has its uid
        version = "leaderworkerset.x-k8s.io/v1"
        if job := build_job(api_version=version, kind="LeaderWorkerSet", name=name):
            return job
    return pod.owner or Job(api_version="v1", kind="Pod", name=pod.name, uid=pod.uid)


def run_key(pod: Pod) -> str:
    """The run's name, a DNS label: from the label keepstep.dev/run, else from the root job.

    Raises PodRefusedError if neither gives one.
    """
    if (label := pod.labels.get(names.RUN_LABEL)) is not None:
        return _checked(label, f"label {names.RUN_LABEL}")
    root = find_root_job(pod)
    if root.kind != "Pod":
        return _key_of_job(root)
    if not pod.name:
        message = "the pod has neither owner nor name, so nothing tells which run it goes on with"
        raise PodRefusedError("NoRun", f"{message}; give it the label {names.RUN_LABEL}")
    return _checked(pod.name, "the pod's name")


def node_rank(pod: Pod) -> int:
    """The pod's place in its run, constant over restarts. Raises PodRefusedError if unknown."""
    if (text := asked_node_rank(pod)) is not None:
        if (asked := _index(text)) is None:
            raise PodRefusedError(
                "BadNodeRank", f"label {names.NODE_RANK_LABEL} is {text!r}, which is no number"
            )
        return asked
    root = find_root_job(pod)
    kind = kind_of(root.api_version, root.kind)
    of_a_set = kind is not None and kind.rank is RankSource.JOBSET
    if not of_a_set and (completion := _indexed(pod, COMPLETION_INDEX)) is not None:
        return completion
    index = _index_by(pod, kind) if kind is not None else None
    if index is None:
        raise PodRefusedError("UnknownJobKind", _no_rank_source(root))
    return index


def _index_by(pod: Pod, kind: JobKind) -> int | None:
    """The node rank by what tells pods of this kind of job apart; None if this pod lacks it."""
    match kind.rank:
        case RankSource.JOBSET:
            label = pod.annotations.get(names.JOB_INDEX_ANNOTATION, JOBSET_INDEX_LABEL)
            if (job := _indexed(pod, label)) is None and label != JOBSET_INDEX_LABEL:
                raise PodRefusedError("BadNodeRank", f"the pod has no label {label} with a number")
            return _in_a_group(job, pod, COMPLETION_INDEX)
        case RankSource.REPLICATED:
            return _in_a_group(_indexed(pod, RAY_REPLICA_LABEL), pod, RAY_HOST_LABEL)
        case RankSource.WRITTEN:
            return _written_rank(pod, kind.label)
        case RankSource.GROUPED:
            return _grouped(pod)
        case RankSource.LABEL:
            return _indexed(pod, kind.label)
        case _:
            return 0


def _in_a_group(group: int | None, pod: Pod, label: str) -> int | None:
    """The node rank of a pod of a job that consists of groups, 0 in its group without the label.
    None without a group: JobSet before 0.6, KubeRay before 1.6, the head of a RayCluster. Raises
    PodRefusedError where two pods would have one node rank."""
    index = _indexed(pod, label) or 0
    if group is not None and max(group, index) >= PODS_OF_A_JOB:
        raise PodRefusedError("BadNodeRank", f"more than {PODS_OF_A_JOB} groups, or pods of one")
    return None if group is None else group * PODS_OF_A_JOB + index


def _grouped(pod: Pod) -> int | None:
    """The node rank of a LeaderWorkerSet's pod. A leader's label with its group is set only by the
    controller's own webhook, maybe later; until then its name, which ends in the group, tells
    it."""
    index, group = _indexed(pod, LWS_INDEX_LABEL), _indexed(pod, LWS_GROUP_LABEL)
    if group is None and index == 0:
        group = _index(pod.name.rpartition("-")[2])
    return None if index is None else _in_a_group(group, pod, LWS_INDEX_LABEL)


def is_queued_by_template(pod: Pod) -> bool:
    """Whether Kueue admitted the pod's job by its template, and so does not see what we add to
    pods."""
    root = find_root_job(pod)
    kind = kind_of(root.api_version, root.kind)
    labelled = any(name.startswith(_KUEUE) for name in pod.labels)
    return labelled and (kind.templated if kind is not None else root.kind != "Pod")


def asked_node_rank(pod: Pod) -> str | None:
    """The node rank that the pod's owner gave it by label; None: the label is missing, or is
    ours."""
    injected = injected_of(pod)
    ours = pod.labels.get(names.INJECTED_LABEL) == names.INJECTED and not (
        injected is not None and injected.ranked
    )
    return None if ours else pod.labels.get(names.NODE_RANK_LABEL)


def _no_rank_source(root: Job) -> str:
    return (
        f"the pod belongs to a {root.kind} ({root.api_version}), and nothing on it tells which of"
        f" its pods it is: set the label {names.NODE_RANK_LABEL} on each pod, a number of its own"
        ' from 0 on that it keeps when it is made again ("0" for a single one), or use a known kind'
    )


def _indexed(pod: Pod, name: str) -> int | None:
    return _index(pod.labels.get(name) or pod.annotations.get(name))


def training_container(pod: Pod) -> Container:
    """The container that trains: the annotated one, else the one that the kind of job names, else
    the first. Raises PodRefusedError if the annotated one does not exist, or none does."""
    by_name = {container.name: container for container in pod.containers}
    if (name := pod.annotations.get(names.CONTAINER_ANNOTATION)) is not None:
        if name not in by_name:
            raise PodRefusedError(
                "NoContainer",
                f"annotation {names.CONTAINER_ANNOTATION} names {name!r}; the pod has"
                f" {', '.join(by_name)}",
            )
        return by_name[name]
    if not pod.containers:
        raise PodRefusedError("NoContainer", "the pod has no container that could train")
    return by_name.get(_usual_container(pod), pod.containers[0])


def parse_run_and_node_rank(pod: Pod) -> Placement:
    """Run key and node rank from what a pod has at its creation. Raises PodRefusedError."""
    return Placement(run_key=run_key(pod), node_rank=node_rank(pod))


def parse_run_placement(pod: Pod) -> Placement | None:
    """Run key and node rank as admission wrote them; None for a pod that was not injected, and for
    labels that admission would not write."""
    key = pod.labels.get(names.RUN_KEY_LABEL)
    rank = _index(pod.labels.get(names.NODE_RANK_LABEL))
    if rank is None or pod.labels.get(names.INJECTED_LABEL) != names.INJECTED:
        return None
    if key is None or not is_run_key(key):
        return None
    return Placement(run_key=key, node_rank=rank)


def injected_of(pod: Pod) -> Injected | None:
    """What admission wrote about the pod; None if it wrote nothing, or if it cannot be read."""
    try:
        return _INJECTED.decode(pod.annotations.get(names.STATUS_ANNOTATION, ""))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def controller_of(references: list[Body]) -> Job | None:
    """The object's owner that is its controller; None if there is none, or if it is not valid."""
    for reference in references:
        if reference.get("controller"):
            return build_job(
                api_version=reference.get("apiVersion"),
                kind=reference.get("kind"),
                name=reference.get("name"),
                uid=reference.get("uid") or "",
            )
    return None


def _container(body: Body) -> Container:
    environment = body.get("env") or []
    literals = {
        variable["name"]: variable["value"] for variable in environment if variable.get("value")
    }
    return Container(name=body.get("name", ""), image=body.get("image", ""), literals=literals)


def _usual_container(pod: Pod) -> str:
    if any(label in pod.labels for label in TRAINJOB_LABELS):
        return _TRAINJOB_CONTAINER
    root = find_root_job(pod)
    kind = kind_of(root.api_version, root.kind)
    return kind.container if kind is not None else ""


def is_run_key(text: str) -> bool:
    """Whether a run can have this name, which is also a directory's name and a label's value."""
    return len(text) <= _LONGEST_KEY and _DNS_LABEL.fullmatch(text) is not None


def _checked(name: str, what: str) -> str:
    if not is_run_key(name):
        raise PodRefusedError(
            "NoRun",
            f"{what} is {name!r}, but a run's name has at most {_LONGEST_KEY} characters out of"
            f" a-z, 0-9 and '-'; set the label {names.RUN_LABEL} to such a name",
        )
    return name


def _key_of_job(root: Job) -> str:
    """A run key from a job's name. Job names may be DNS subdomains, which are longer and have dots.
    The digits of the uid keep shortened names apart."""
    digits = root.uid.replace("-", "").lower()[:_HEX_OF_UID]
    if not digits.isalnum():
        raise PodRefusedError(
            "NoRun",
            f"nothing on the pod has the uid of its {root.kind} {root.name}, so nothing tells which"
            f" run it goes on with; give it the label {names.RUN_LABEL} in all templates",
        )
    name = root.name.lower().replace(".", "-")[: _LONGEST_KEY - _HEX_OF_UID - 1].rstrip("-")
    return f"{name}-{digits}"


def _written_rank(pod: Pod, label: str) -> int | None:
    """The rank that a controller wrote. The training operator, and Volcano's plugin for PyTorch,
    write the pod's index into RANK (whatever nproc-per-node is). The training operator does not for
    an elastic job without a master; there the index in the label is unique."""
    try:
        literals = training_container(pod).literals
    except PodRefusedError:
        literals = {}
    written = (_index(literals.get(name)) for name in ("RANK", "PET_NODE_RANK"))
    return next((index for index in (*written, _indexed(pod, label)) if index is not None), None)


def _index(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None
