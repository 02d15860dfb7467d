"""Turns Kubernetes objects into records. No other module takes bodies apart. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

from keepstep.wire.run_reports import parse_utc
from keepstep_operator import names
from keepstep_operator.api.cluster_objects import (
    AgentRecord,
    JobState,
    NodeRecord,
    PodRecord,
    PolicyRecord,
    RunKey,
    RunObject,
)
from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.pod import (
    Injected,
    Pod,
    PodRefusedError,
    find_root_job,
    injected_of,
    is_queued_by_template,
    parse_pod,
    parse_run_and_node_rank,
    parse_run_placement,
    training_container,
)
from keepstep_operator.api.policy import (
    Policy,
    VolumeKind,
    parse_policy,
    parse_status_policy,
    require_allowed,
)
from keepstep_operator.api.run_status import MOST_WARNINGS, RunStatus, cut_text, read_status
from keepstep_operator.object_body import Body

_HARMLESS = ("ContainerCreating", "PodInitializing")
_LONGEST_NAME = 253
_LONGEST_WARNING = 400
_DONE = {"Complete", "Succeeded", "Completed", "Finished"}
_PHASES = {
    "Completed": JobState.FINISHED,
    "Complete": JobState.FINISHED,
    "Failed": JobState.FAILED,
    "Terminated": JobState.FAILED,
}
"""The phases of a Volcano Job that is over, and the deployment statuses of a RayJob. An Aborted
Volcano Job may be suspended, and be resumed."""


def asks_for_keepstep(body: Body) -> bool:
    """Whether the pod asks for keepstep, or has the sidecar."""
    metadata = body.get("metadata") or {}
    return names.POLICY_ANNOTATION in (
        metadata.get("annotations") or {}
    ) or names.INJECTED_LABEL in (metadata.get("labels") or {})


def parse_pod_record(body: Body) -> PodRecord | None:
    """The pod, if it asks for keepstep and belongs to a run; None otherwise.

    This includes pods without a sidecar. Their run is the one that admission would have named.
    """
    pod = parse_pod(body)
    injected = pod.has_sidecar and parse_run_placement(pod) is not None
    if not injected and pod.policy is None:
        return None
    try:
        place = parse_run_placement(pod) or parse_run_and_node_rank(pod)
    except PodRefusedError:
        return None
    annotation = injected_of(pod) or Injected(policy=pod.policy or "")
    metadata, status = body.get("metadata") or {}, body.get("status") or {}
    warnings = annotation.warnings[:MOST_WARNINGS] if injected else ()
    trainer = _container_status(status, _training_name(pod, annotation))
    return PodRecord(
        uid=pod.uid,
        namespace=_shared(pod.namespace),
        name=pod.name,
        injected=injected,
        run=RunKey(_shared(pod.namespace), _shared(place.run_key)),
        node_rank=place.node_rank,
        node=pod.node,
        phase=_shared(pod.phase or "Pending"),
        created_at=str(metadata.get("creationTimestamp") or ""),
        address=str(status.get("podIP") or ""),
        training_since=_running_since(trainer),
        trouble=cut_text(_trouble(status) if injected else annotation.message),
        warnings=tuple(
            _shared(cut_text(warning, longest=_LONGEST_WARNING)) for warning in warnings
        ),
        volumes=_volumes(body),
        policy=_shared(cut_text(annotation.policy, longest=_LONGEST_NAME)),
        policy_generation=annotation.generation,
        sidecar_image=_shared(annotation.image),
        sidecar_version=_shared(annotation.version),
        labelled=names.RUN_LABEL in pod.labels,
        uncounted=is_queued_by_template(pod),
        job=annotation.job or find_root_job(pod),
        deleting=pod.deleting,
    )


def parse_agent_pod(body: Body) -> AgentRecord:
    """The agent's pod on a node. It serves while it is ready and stays."""
    metadata, status = body.get("metadata") or {}, body.get("status") or {}
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or []
    )
    address = str(status.get("podIP") or "")
    host = f"[{address}]" if ":" in address else address
    serves = ready and address and not metadata.get("deletionTimestamp")
    return AgentRecord(
        uid=str(metadata.get("uid") or ""),
        node=str((body.get("spec") or {}).get("nodeName") or ""),
        address=f"{host}:{names.SIDECAR_PEER_PORT}" if serves else "",
    )


def _shared(text: str) -> str:
    """One object for a text that thousands of pods share."""
    return sys.intern(text) if type(text) is str else text


def _training_name(pod: Pod, injected: Injected) -> str:
    if injected.container:
        return injected.container
    try:
        return training_container(pod).name
    except PodRefusedError:
        return ""


def _container_status(status: Body, name: str) -> Body:
    containers: list[Body] = status.get("containerStatuses") or []
    return next((container for container in containers if container.get("name") == name), {})


def _running_since(container: Body) -> float | None:
    running = (container.get("state") or {}).get("running")
    return None if running is None else parse_utc(str(running.get("startedAt"))) or 0.0


def _volumes(body: Body) -> tuple[VolumeKind, ...]:
    """The kinds of the volumes that injection added for the policy."""
    prefix, volumes = names.VOLUME_PREFIX, (body.get("spec") or {}).get("volumes") or []
    added = [volume for volume in volumes if str(volume.get("name", "")).startswith(prefix)]
    return tuple(kind for volume in added for kind in VolumeKind if kind.value in volume)


def _trouble(status: Body) -> str:
    """Why the pod does not run, in the words of the scheduler, or of the kubelet about a
    container."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            why = condition.get("message") or condition.get("reason") or "no reason given"
            return f"not scheduled: {why}"
    parts = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for part in parts:
        waiting = (part.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason")) and reason not in _HARMLESS:
            detail = f" ({waiting['message']})" if waiting.get("message") else ""
            return f"container {part.get('name')}: {reason}{detail}"
    return ""


def parse_policy_record(body: Body, *, allowed_paths: Iterable[str]) -> PolicyRecord:
    """The policy and, if it is not accepted, the reason."""
    metadata = body.get("metadata") or {}
    record = PolicyRecord(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        generation=int(metadata.get("generation") or 0),
    )
    try:
        policy = parse_policy(body)
        require_allowed(policy, allowed_paths)
    except PolicyError as error:
        return replace(record, problem=(error.reason, cut_text(str(error))))
    advice = f"{_volume_advice(policy)}; {_tier_advice(policy)}"
    return replace(record, policy=policy, advice=advice)


def _volume_advice(policy: Policy) -> str:
    kinds = [volume.source.kind for volume in policy.volumes]
    fleeting = sorted({str(kind) for kind in kinds if kind is not VolumeKind.HOST_PATH})
    if not fleeting:
        return "a step outlives its pod on the same node"
    return (
        f"volumes of kind {' and '.join(fleeting)} go with their pod: a step outlives the restart"
        " of a container, not that of a pod; use hostPath for that"
    )


def _tier_advice(policy: Policy) -> str:
    outlive = []
    if policy.peers is not None:
        outlive.append("copies with peers outlive the loss of a node")
    if policy.archive is not None:
        outlive.append(
            f"every {policy.archive.every} steps one goes to {policy.archive.where}, which outlives"
            " nodes and jobs"
        )
    return "; ".join(outlive) or "no tier outlives the loss of a node (see peers and archive)"


def parse_run_object(body: Body, *, with_status: bool = True) -> RunObject:
    """A CheckpointRun. Fields that do not fit the schema count as absent. Its status is read once,
    as that takes a millisecond and is our own."""
    metadata = body.get("metadata") or {}
    spec = _object(body.get("spec"))
    status = read_status(_object(body.get("status"))) if with_status else RunStatus()
    pins, restore_from = spec.get("pins"), spec.get("restoreFrom")
    namespace = str(metadata.get("namespace") or "")
    return RunObject(
        key=RunKey(namespace, str(metadata.get("name") or "")),
        uid=str(metadata.get("uid") or ""),
        generation=int(metadata.get("generation") or 1),
        pins=tuple(map(str, pins)) if isinstance(pins, list) else (),
        restore_from=restore_from if isinstance(restore_from, str) else "",
        paused=spec.get("paused") is True,
        fresh_start=str((metadata.get("annotations") or {}).get(names.FRESH_START_ANNOTATION, "")),
        policy=parse_status_policy(status.policy, namespace),
        status=status,
    )


def _object(value: object) -> Body:
    return value if isinstance(value, dict) else {}


def job_state(body: Body) -> JobState:
    """Whether a job is over: by the phase of a Volcano Job, the deployment status of a RayJob, and
    the conditions of all others. A job that is being deleted makes no pod again."""
    if (body.get("metadata") or {}).get("deletionTimestamp"):
        return JobState.GONE
    status = body.get("status") or {}
    state = status.get("state")  # of a RayCluster one word, which is no end
    phase = state.get("phase") if isinstance(state, dict) else status.get("jobDeploymentStatus")
    if phase:
        return _PHASES.get(str(phase), JobState.ACTIVE)
    for condition in status.get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in _DONE:
            return JobState.FINISHED
        if condition.get("status") == "True" and condition.get("type") == "Failed":
            return JobState.FAILED
    return JobState.ACTIVE


_TAINT = "node.kubernetes.io/unschedulable"


def parse_node(body: Body) -> NodeRecord:
    """A Node."""
    metadata, spec = body.get("metadata") or {}, body.get("spec") or {}
    taints = {taint.get("key") for taint in spec.get("taints") or []}
    return NodeRecord(
        name=str(metadata.get("name") or ""),
        labels=metadata.get("labels") or {},
        cordoned=bool(spec.get("unschedulable")) or _TAINT in taints,
        ready=all(
            condition.get("status") == "True"
            for condition in (body.get("status") or {}).get("conditions") or []
            if condition.get("type") == "Ready"
        ),
    )
