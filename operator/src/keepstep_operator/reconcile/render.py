"""CheckpointRun.status and CheckpointPolicy.status. Pure.

A status contains no ages and no "now", so it changes only when the run does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Final

from keepstep.wire.run_reports import RunReport, format_utc
from keepstep_operator import names
from keepstep_operator.api.cluster_objects import PodRecord, PolicyRecord
from keepstep_operator.api.policy import Policy
from keepstep_operator.api.run_status import (
    MOST_WARNINGS,
    Condition,
    JobStatus,
    PodStepStatus,
    PolicyStatus,
    RankMemoryStatus,
    RunStatus,
    SidecarVersionStatus,
    cut_text,
    read_status,
)
from keepstep_operator.object_body import Body
from keepstep_operator.reconcile import pod_texts
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts
from keepstep_operator.reconcile.conditions import (
    ARCHIVED,
    PROTECTED,
    ConditionState,
    condition_states,
    draining_sole_holders,
)
from keepstep_operator.reconcile.run_transitions import FINISHED, Run
from keepstep_operator.reconcile.survival import find_survivable_failures

ACCEPTED: Final = "Accepted"
_NODES_NAMED: Final = 5
_TEXT: Final = 300


def render_status(run: Run, cluster: ClusterFacts, *, now: float) -> RunStatus:
    """The whole status as it should be now. What only a report shows stays as an earlier process
    wrote it, until there is a report."""
    found = condition_states(run, cluster, now=now)
    slots = None if run.policy is None else run.policy.slots
    status = replace(
        run.status,
        observed_generation=run.object.generation if run.object is not None else 0,
        phase=_phase(run),
        job=JobStatus(**asdict(run.job)) if run.job is not None else None,
        job_name=run.job.name if run.job is not None else "",
        policy=_policy(run.policy),
        start=_start(run),
        sidecar_image=max((pod.sidecar_image for pod in run.job_pods), default=""),
        nodes=_pods(run),
        nodes_summary=_nodes(run),
        committed=run.committed,
        protected=found[PROTECTED].status,
        memory=RankMemoryStatus(slots=slots) if slots is not None else None,
        recent=run.recent,
        warnings=_warnings(run, cluster),
        conditions=_conditions(run, found, now),
    )
    return status if run.report is None else _with_report(status, run, run.report)


def _with_report(status: RunStatus, run: Run, report: RunReport) -> RunStatus:
    record, outlived = run.record, [failure.value for failure in find_survivable_failures(run)]
    epoch = str(report.epochs[0].id) if report.epochs else record.counted
    pods = run.pods
    return replace(
        status,
        sidecar_version=cut_text(report.sidecar, longest=128),
        library_version=cut_text(report.library, longest=128),
        world=report.world,
        epoch=epoch,
        origin=cut_text(report.origin, longest=128),
        step=report.step,
        behind=report.behind,
        watermarks={str(tier): str(step) for tier, step in report.watermarks.items()},
        tiers=",".join(map(str, report.held_by)),
        survives=tuple(outlived),
        survives_summary=",".join(outlived),
        pinned=cut_text(report.pinned, longest=_TEXT),
        stall=report.stall,
        restarts=record.restarts,
        lost_steps=record.lost_steps,
        goodput=record.goodput,
        ranks=tuple(
            PodStepStatus(
                node_rank=node.node_rank,
                node=node.node,
                pod=pods[node.pod].name if node.pod in pods else "",
                ranks=node.ranks,
                memory=node.memory,
                local=node.local,
                buddies=node.buddies,
            )
            for node in sorted(report.nodes, key=lambda node: node.node_rank)
        ),
        holders=record.holders,
        drives=record.drives,
        restore_from=record.restore_from,
    )


def _phase(run: Run) -> str:
    if run.finished_at is not None:
        return FINISHED
    report = run.report
    if report is None:
        return "Waiting" if run.status.phase == FINISHED else run.status.phase
    if report.world and report.alive >= report.world:
        return "Running"
    return "Restoring" if report.step or run.committed else "Waiting"


def _policy(policy: Policy | None) -> PolicyStatus | None:
    if policy is None:
        return None
    return PolicyStatus(name=policy.name, generation=policy.generation, spec=policy.spec)


def _start(run: Run) -> SidecarVersionStatus | None:
    """The sidecar that the run's oldest staying pod started with. None if no pod stays: the next
    one then starts with the sidecar that is current then."""
    staying = (pod for pod in run.job_pods if pod.is_active)
    first = min(staying, key=lambda pod: (pod.created_at, pod.name), default=None)
    if first is None:
        return None
    return SidecarVersionStatus(image=first.sidecar_image, version=first.sidecar_version)


def _pods(run: Run) -> int:
    return sum(not pod.over for pod in run.job_pods) or len([*run.job_pods])


def _nodes(run: Run) -> str:
    nodes = sorted({pod.node for pod in run.job_pods if pod.node})
    more = len(nodes) - _NODES_NAMED
    return ",".join(nodes[:_NODES_NAMED]) + (f",+{more}" if more > 0 else "")


def _conditions(run: Run, found: Mapping[str, ConditionState], now: float) -> tuple[Condition, ...]:
    """All conditions with their times. When a run that had finished is seen again, no leader says
    any more where its steps lie: what `Protected` and `Archived` said at its end stands."""
    before = {condition.type: condition for condition in run.status.conditions}
    made = {
        kind: Condition(
            type=kind,
            status=verdict.status,
            reason=verdict.reason,
            message=cut_text(verdict.message),
            observed_generation=run.object.generation if run.object is not None else 0,
            last_transition_time=transition_time(before.get(kind), verdict.status, now),
        )
        for kind, verdict in found.items()
    }
    ended = run.finished_at is not None and run.status.phase == FINISHED and run.report is None
    stand = {
        kind: condition
        for kind, condition in before.items()
        if ended and kind in (PROTECTED, ARCHIVED)
    }
    return tuple({**made, **stand}.values())


def transition_time(before: Condition | None, status: str, now: float) -> str:
    """The time of the last transition. Only a change of status is one; reasons and messages may
    change at any time."""
    if before is not None and before.status == status and before.last_transition_time:
        return before.last_transition_time
    return format_utc(now)


# --- warnings ------------------------------------------------------------------------------------


def _warnings(run: Run, cluster: ClusterFacts) -> tuple[str, ...]:
    texts = dict.fromkeys(cut_text(text) for text in _all_warnings(run, cluster))
    return tuple(texts)[:MOST_WARNINGS]


def _all_warnings(run: Run, cluster: ClusterFacts) -> Iterator[str]:
    """All warnings, the one to act on first first."""
    report, over = run.report, run.finished_at is not None
    if run.policy is not None and not over:
        yield from _of_policy(run.policy, run.policy_now)
    if report is not None and report.fresh:
        warning = f"epoch {cut_text(report.fresh, longest=40)} began at step 0 beside older steps."
        yield f"{warning} {pod_texts.explain_set_aside_steps(run.key)}"
    if run.earlier and not over:
        yield (
            f"an earlier job of this name was run {run.earlier}; its steps are kept, but this"
            f" job does not go on from them. To do so, make it with the label {names.RUN_LABEL}:"
            f" {run.earlier} on its pods"
        )
    yield from (pod_texts.other_job_text(pod, run.job, run.key) for pod in pods_of_other_jobs(run))
    yield from (alarm.text for alarm in (report.alarms if report is not None else ()))
    for pod in sorted(run.job_pods, key=lambda pod: pod.name):
        if pod.trouble and pod.injected:
            yield f"pod {pod.name}: {pod.trouble}"
    step = run.committed.step if run.committed is not None else None
    yield from (
        pod_texts.cordoned_sole_copy_text(node, step)
        for node in draining_sole_holders(run, cluster)
    )
    for text, pods in sorted(_of_pods(run).items()):
        more = len(pods) - 1
        yield f"{text} (pod {min(pods)}{f' and {more} more' if more else ''})"


def pods_of_other_jobs(run: Run) -> list[PodRecord]:
    """The pods of other jobs with the run's label."""
    pods = (pod for pod in run.pods.values() if pod.job in run.rivals and pod.is_active)
    return sorted(pods, key=lambda pod: pod.uid)


def _of_policy(held: Policy, now: PolicyRecord | None) -> Iterator[str]:
    """Warnings about the policy. `held`: the policy that the run goes by. `now`: the policy of that
    name now."""
    if now is None:
        yield (
            f"CheckpointPolicy {held.name} does not exist any more: this run goes on by what it"
            " was, but pods that are made from now on get no sidecar. Create it again"
        )
    elif now.problem is not None:
        yield f"CheckpointPolicy {now.name} is not accepted: {now.problem[1]}"
    elif now.generation > held.generation:
        yield (
            f"CheckpointPolicy {now.name} has changed (generation {held.generation} to"
            f" {now.generation}): it holds for pods that are made from now on"
        )


def _of_pods(run: Run) -> dict[str, list[str]]:
    """The warnings of injection and of sidecars, each with the names of its pods."""
    found: dict[str, list[str]] = {}

    def add(texts: Iterable[str], pod: PodRecord) -> None:
        for text in texts:
            found.setdefault(cut_text(text, longest=_TEXT), []).append(pod.name)

    for pod in run.job_pods:
        add(pod.warnings if pod.is_active else (), pod)
    for node in run.report.nodes if run.report is not None else ():
        if node.pod in run.pods:
            add(node.warnings, run.pods[node.pod])
    return found


# --- policies ------------------------------------------------------------------------------------


def policy_status(policy: PolicyRecord, before: Body, *, now: float) -> Body:
    """CheckpointPolicy.status: the condition Accepted, which says what to change."""
    known = {condition.type: condition for condition in read_status(before).conditions}
    status, reason, message = "True", ACCEPTED, policy.advice
    if policy.problem is not None:
        status, (reason, message) = "False", policy.problem
        message += ". Pods that ask for it start without keepstep until it is changed"
    condition = {
        "type": ACCEPTED,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": policy.generation,
        "lastTransitionTime": transition_time(known.get(ACCEPTED), status, now),
    }
    return {"observedGeneration": policy.generation, "conditions": [condition]}
