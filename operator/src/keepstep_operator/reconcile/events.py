"""The Kubernetes Events of a run: what changed between two of its values, as objects. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Final

from keepstep.wire.run_reports import AdvisoryKind
from keepstep_operator import names
from keepstep_operator.api.cluster_objects import Job, PolicyRecord, RunKey
from keepstep_operator.api.run_status import cut_text
from keepstep_operator.object_body import Body
from keepstep_operator.reconcile import pod_texts
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts
from keepstep_operator.reconcile.conditions import (
    current_advisories,
    draining_sole_holders,
    pods_without_library,
)
from keepstep_operator.reconcile.render import pods_of_other_jobs
from keepstep_operator.reconcile.run_transitions import FINISHED, Run

CONTROLLER: Final = "keepstep.dev/reconcile"
_NORMAL: Final = {"Restored", "Forked", "RolledBack", "LeftShardsServed"}
"""What happened and asks for no action."""
_REPORTED: Final = {
    AdvisoryKind.COMMIT_STALLED,
    AdvisoryKind.RESTORE_REFUSED,
    AdvisoryKind.PART_GONE,
}
"""Doubts that are an Event, too, when they begin."""
_COMMITTED_S: Final = 300.0
_AGAIN_S: Final = 600.0
_HOUR_S: Final = 3600.0
_LONGEST_NAME: Final = 200


@dataclass(frozen=True)
class KubernetesEvent:
    """An Event about the run and its job. It is not repeated within `period_s`, unless its reason
    or `topic` differ. `about`: another object than the run's job."""

    reason: str
    message: str
    _: KW_ONLY
    warning: bool = True
    topic: str = ""
    period_s: float = _AGAIN_S
    about: Job | None = None


def change_events(before: Run, after: Run) -> Iterator[KubernetesEvent]:
    """What is to be told of the change from `before` to `after`."""
    step, report = after.committed, after.report
    if step is not None and report is not None and step != before.committed:
        message = f"step {step.step} is durable on all {report.world} ranks"
        yield KubernetesEvent("Committed", message, warning=False, period_s=_COMMITTED_S)
    for event in after.recent:
        if event not in before.recent and event.type != FINISHED:
            quiet, topic = event.type in _NORMAL, f"{event.time} {event.step}"
            yield KubernetesEvent(event.type, event.message, warning=not quiet, topic=topic)
    known = before.report.alarms if before.report is not None else ()
    for alarm in after.report.alarms if after.report is not None else ():
        if alarm not in known:
            yield KubernetesEvent(alarm.kind, alarm.text, topic=alarm.text)
    for doubt in current_advisories(after):
        if doubt.kind in _REPORTED and doubt.kind not in {
            doubt.kind for doubt in current_advisories(before)
        }:
            yield KubernetesEvent(str(doubt.kind), doubt.text)
    yield from _of_sidecars(before, after)
    for pod in pods_of_other_jobs(after):
        if pod.job not in before.rivals:
            message = pod_texts.other_job_text(pod, after.job, after.key)
            yield KubernetesEvent("RunTaken", message, topic=str(pod.job), about=pod.job)


def recurring_events(run: Run, cluster: ClusterFacts, *, now: float) -> Iterator[KubernetesEvent]:
    """What holds now and is told again after its period, as long as it does: the API server keeps
    an Event for an hour only."""
    for pod in run.job_pods:
        if not pod.injected and not pod.over:
            message = pod_texts.not_injected_text(pod)
            yield KubernetesEvent("NotInjected", message, topic=pod.uid, period_s=_HOUR_S / 2)
    for name in pods_without_library(run, now):
        message = pod_texts.describe_missing_trainer(name)
        yield KubernetesEvent("LibraryMissing", message, topic=name, period_s=_HOUR_S)
    step = run.committed.step if run.committed is not None else None
    for node in draining_sole_holders(run, cluster):
        message = pod_texts.cordoned_sole_copy_text(node, step)
        yield KubernetesEvent("NodeDraining", message, topic=node, period_s=_HOUR_S)


def _of_sidecars(before: Run, after: Run) -> Iterator[KubernetesEvent]:
    known = before.report.nodes if before.report is not None else ()
    warnings = {report.node_rank: {*map(_topic, report.warnings)} for report in known}
    for node in after.report.nodes if after.report is not None else ():
        pod = after.pods.get(node.pod)
        for text in node.warnings if pod is not None else ():
            if pod is not None and _topic(text) not in warnings.get(node.node_rank, ()):
                message = f"{pod.name}: {text}"
                topic = f"{pod.uid} {_topic(text)}"
                yield KubernetesEvent("SidecarWarning", message, topic=topic, period_s=_HOUR_S)


def _topic(text: str) -> str:
    """The warning without its numbers: with each step that fails alike, it has others."""
    return re.sub(r"\b[0-9a-f.-]*\d[0-9a-f.-]*\b", "#", text)


def policy_rejected_event(policy: PolicyRecord) -> KubernetesEvent | None:
    """The event on a policy that is not accepted; None if it is."""
    if policy.problem is None:
        return None
    about = Job(
        api_version=names.API_VERSION, kind="CheckpointPolicy", name=policy.name, uid=policy.uid
    )
    reason, message = policy.problem
    topic = str(policy.generation)
    return KubernetesEvent(reason, message, topic=topic, period_s=_HOUR_S, about=about)


def event_bodies(
    event: KubernetesEvent, key: RunKey, *, job: Job | None, run_uid: str, name: str, now: float
) -> Iterator[Body]:
    """The Event on the job (or what else it is about) and the one on the run. Each names the other
    object. `run_uid` '': the run has no object. `name`: a unique end of the Events' names."""
    run = _reference(names.API_VERSION, "CheckpointRun", key.name, key.namespace, run_uid)
    about = event.about or job
    if about is None:
        yield _body(event, run, None, name=name, now=now)
        return
    regarding = _reference(about.api_version, about.kind, about.name, key.namespace, about.uid)
    yield _body(event, regarding, run if run_uid else None, name=name, now=now)
    if run_uid:
        yield _body(event, run, regarding, name=name, now=now)


def _reference(api_version: str, kind: str, name: str, namespace: str, uid: str) -> Body:
    return {
        "apiVersion": api_version, "kind": kind, "name": name, "namespace": namespace, "uid": uid,
    }  # fmt: skip


def _body(
    event: KubernetesEvent, regarding: Body, related: Body | None, *, name: str, now: float
) -> Body:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{regarding['name'][:_LONGEST_NAME]}.{name}",
            "namespace": regarding["namespace"],
        },
        "regarding": regarding,
        **({"related": related} if related else {}),
        "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "action": "Reconcile",
        "note": cut_text(event.message),
        "reportingController": CONTROLLER,
        "reportingInstance": "keepstep-reconcile",
    }
