"""The conditions of a run, worded for the person who is on call. Pure.

`Protected` sums them up: True means that a crash now would cost little. Its checks are ordered: the
problem to act on first comes first.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.ledger import Restart
from keepstep_operator import names
from keepstep_operator.api.quantities import format_bytes
from keepstep_operator.api.run import utc
from keepstep_operator.reconcile.state import messages
from keepstep_operator.reconcile.state.durability import Survives, volumes_outlive_pod
from keepstep_operator.reconcile.state.health import LIBRARY_S, SILENT_S
from keepstep_operator.reconcile.state.previous_status import FINISHED
from keepstep_operator.reconcile.state.run_view import RunView
from keepstep_operator.reconcile.status.condition import (
    NO_REPORTS,
    OVER,
    ConditionState,
    and_more,
    few,
)
from keepstep_operator.reconcile.status.tier_conditions import (
    ARCHIVED,
    LEFT_SERVED,
    REPLICATED,
    RESTORE_FROM,
    archived,
    left_served,
    replicated,
    restore_from,
)

PROTECTED = "Protected"
FULLY_INJECTED = "FullyInjected"
COMMITTING = "Committing"
DUPLICATE_NODE_RANK = "DuplicateNodeRank"
COUNTED_BY_QUEUE = "CountedByQueue"
RESTORE_REFUSED = "RestoreRefused"


def condition_states(run: RunView) -> dict[str, ConditionState]:
    """The conditions by type, in the order in which they are shown, without those that do not apply
    to this run."""
    injected, twice, committing = _fully_injected(run), _duplicate_node_rank(run), _committing(run)
    refused = _restore_refused(run)
    peers, archive = replicated(run), archived(run)
    protected = (
        _finished(run)
        or _unheard(run)
        or _failing(injected)
        or (twice and replace(twice, status="False"))
        or (refused and replace(refused, status="False"))
        or _no_library(run)
        or _silent(run)
        or _nothing_kept(run)
        or _failing(committing)
        or _failing(peers)
        or _failing(archive)
        or ConditionState("True", PROTECTED, _what_is_kept(run))
    )
    said = {
        PROTECTED: protected,
        FULLY_INJECTED: injected,
        DUPLICATE_NODE_RANK: twice,
        RESTORE_REFUSED: refused,
        COUNTED_BY_QUEUE: _counted_by_queue(run),
        COMMITTING: committing,
        REPLICATED: peers,
        ARCHIVED: archive,
        RESTORE_FROM: restore_from(run),
        LEFT_SERVED: left_served(run),
    }
    return {type: verdict for type, verdict in said.items() if verdict is not None}


def _failing(verdict: ConditionState | None) -> ConditionState | None:
    return verdict if verdict is not None and verdict.status == "False" else None


# --- Protected: each of these is None if there is nothing to act on -------------------------------


def _finished(run: RunView) -> ConditionState | None:
    if not run.finished:
        return None
    how = next((one.message for one in run.recent if one.type == FINISHED), "the job is over")
    how = how.partition(";")[0]
    if run.commit is None:
        return ConditionState("Unknown", FINISHED, f"{how}; no step of it was committed")
    said = f"{how}; its last committed step is {run.commit.id.step}"
    if volumes_outlive_pod(run.volumes):
        said += (
            ". It stays on the volumes of its nodes; a new job goes on from it when its pods carry"
            f" the label {names.RUN_LABEL}: {run.key.name}"
        )
    return ConditionState("Unknown", FINISHED, said)


def _unheard(run: RunView) -> ConditionState | None:
    if run.places:
        return None
    troubled = [f"; pod {pod.name} is {pod.trouble}" for pod in run.pods.values() if pod.trouble]
    if not run.pods:
        return ConditionState("Unknown", "NoPods", "no pod of this run exists")
    if all(not pod.injected for pod in run.pods.values()):
        return None
    return ConditionState(
        "Unknown",
        "NoReports",
        f"no sidecar of its {len(run.pods)} pods has reported yet{min(troubled, default='')}. If"
        f" that stays so, look at kubectl logs -n {run.key.namespace} POD -c keepstep-sidecar",
    )


def _duplicate_node_rank(run: RunView) -> ConditionState | None:
    """None if every pod that stays has its own node rank."""
    by_rank: dict[int, list[str]] = {}
    for pod in run.pods.values():
        if pod.stays:
            by_rank.setdefault(pod.node_rank, []).append(pod.name)
    twice = {rank: pods for rank, pods in by_rank.items() if len(pods) > 1}
    if not twice:
        return None
    rank = min(twice)
    message = (
        f"pods {few(twice[rank])} have node rank {rank} between them, so only one of them can be"
        f" heard and no step of the run can become committed: give each pod the label"
        f" {names.NODE_RANK_LABEL} with a number of its own, or each job a run of its own (label"
        f" {names.RUN_LABEL})"
    )
    return ConditionState("True", DUPLICATE_NODE_RANK, message)


def _counted_by_queue(run: RunView) -> ConditionState | None:
    """None if no queue is involved, or if it counts all that the pods request."""
    policy = run.policy
    if policy is None or not policy.added_bytes:
        return None
    if not any(pod.uncounted and pod.stays for pod in run.pods.values()):
        return None
    message = (
        f"Kueue admitted the job by its template; policy {policy.name} (accounting: Add) adds"
        f" {format_bytes(policy.added_bytes)} of memory to each of its pods, which no quota counts,"
        " so pods may not find the place that the queue believes to be free. Set"
        " accounting: CarveOut, and raise the training container's memory by as much"
    )
    return ConditionState("False", "MemoryAdded", message)


def _no_library(run: RunView) -> ConditionState | None:
    if not (pods := sorted(run.health.without_library)):
        return None
    message = messages.without_library(pods[0], after_s=LIBRARY_S) + and_more(pods)
    return ConditionState("False", "LibraryMissing", message)


def _silent(run: RunView) -> ConditionState | None:
    if not (pods := sorted(run.health.silent)):
        return None
    return ConditionState(
        "Unknown",
        "SidecarsSilent",
        f"no report for more than {SILENT_S:.0f} s from the sidecars of {few(pods)}: what is"
        " written here is what was known before. Training and restarts do not depend on it. Look at"
        f" kubectl logs -n {run.key.namespace} {pods[0]} -c keepstep-sidecar",
    )


def _restore_refused(run: RunView) -> ConditionState | None:
    """None unless the ranks' vote refused since the last restore."""
    if not run.refusals or run.finished:
        return None
    said = messages.restore_refused(run.refusals, run.refused)
    return ConditionState("True", RESTORE_REFUSED, said)


def _nothing_kept(run: RunView) -> ConditionState | None:
    """None if a restart goes on from a step. Otherwise, what it does by the ranks' own rule."""
    if run.outlook.restart is Restart.GOES_ON:
        return None
    missing = [place.pod for place in run.places.values() if place.gone]
    newest = run.outlook.step.step if run.outlook.step else 0
    if run.outlook.restart is not Restart.BEGINS and (missing or run.settled):
        gone = f"of step {newest}, and of every other step, a part is gone"
        if run.gone_for_good:
            went = f": {run.other_drives}. The" if run.other_drives else " with its pod: the"
            said = f"{gone} for good{went} next start begins again at step 0"
        else:
            other = f" ({run.other_drives})" if run.other_drives else ""
            said = f"{gone}{other}: starts wait until it is back. {messages.begin_again(run.key)}"
        if missing:
            said += f". {len(missing)} pods have not come back: look at the job"
        return ConditionState("False", "PodsMissing" if missing else "PartGone", said)
    return ConditionState(
        "False",
        "NothingKept",
        "no step is held by all ranks yet: a crash now begins at step 0. This is usual until the"
        " first save; if it stays so, "
        + (_warned(run) or "does the script call checkpointer.save(step) on every rank?"),
    )


def _what_is_kept(run: RunView) -> str:
    restart = run.outlook.step.step if run.outlook.step else 0
    said = [
        f"the restart of a container goes on from step {restart}",
        *_of_a_pod(run),
    ]
    if Survives.JOB_RECREATE not in run.survives and Survives.POD_RESTART in run.survives:
        said.append("a new job begins anew, unless its pods carry the label keepstep.dev/run")
    said += [messages.draining(node, None) for node in sorted(run.health.draining)]
    return "; ".join(said)


def _of_a_pod(run: RunView) -> list[str]:
    """What the loss of a pod or its node costs."""
    stays, committed, said = volumes_outlive_pod(run.volumes), run.committed, []
    if stays and committed is not None:
        said.append(
            f"a pod that comes back to its node goes on from step {committed.step} or newer"
        )
    if (safe := run.safety).step is not None:
        where = " in the archive" if safe.step == safe.archived else ""
        return [*said, f"the loss of a pod or its node goes back to step {safe.step.step}{where}"]
    if stays and committed is None:
        return [*said, "nothing is committed yet: a pod that is deleted takes its part with it"]
    if stays:
        return [*said, "a node that is lost takes its part with it"]
    if (apart := run.safety.pod) is not None:
        return [
            f"a pod that is deleted or moved goes on from step {apart.step} or newer, which the"
            " other pods have"
        ]
    kinds = ", ".join(sorted({str(kind) for kind in run.volumes})) or "none"
    waits = not run.gone_for_good and len(run.places) > 1
    then = "waits for a person (onLoss: Wait)" if waits else "begins at step 0"
    return [
        f"a pod that is deleted or moved takes its part with it, and the run then {then}"
        f" (volumes: {kinds}; hostPath outlives pods)"
    ]


# --- the other two -------------------------------------------------------------------------------


def _fully_injected(run: RunView) -> ConditionState:
    pods = [pod for pod in run.pods.values() if not pod.over]
    if run.finished:
        return OVER
    if not pods:
        return ConditionState("Unknown", "NoPods", "no pod of this run exists")
    without = sorted((pod for pod in pods if not pod.injected), key=lambda pod: pod.name)
    if without:
        message = messages.not_injected(without[0]) + and_more([pod.name for pod in without])
        return ConditionState("False", "NotInjected", message)
    if run.health.absent_ranks:
        message = (
            f"the trainers say that the run has {run.world} ranks, but its {len(pods)} pods serve"
            f" {run.world - run.health.absent_ranks}: the others have no sidecar, so no step can"
            f" become committed. Give the annotation {names.POLICY_ANNOTATION} to every pod"
            " template of the job, and make its pods again"
        )
        return ConditionState("False", "RanksWithoutSidecar", message)
    return ConditionState("True", "AllInjected", f"all {len(pods)} pods have the sidecar")


def _committing(run: RunView) -> ConditionState:
    if run.finished:
        return OVER
    if run.health.stalled and (twice := _duplicate_node_rank(run)) is not None:
        return ConditionState("False", "CommitStalled", twice.message)
    if run.health.stalled:
        return ConditionState(
            "False", "CommitStalled", f"{run.health.stalled}. {_what_hinders(run)}"
        )
    if not run.places:
        return NO_REPORTS
    if run.commit is None and run.commit_lost is not None:
        said = f"step {run.commit_lost.step} was committed, and a part of it is gone with its pod"
        if run.outlook.restart is Restart.GOES_ON:
            said += ", but a restart goes on from what the other pods have"
            return ConditionState("Unknown", "NothingCommitted", said)
        return ConditionState("False", "PartGone", said)
    if run.commit is None:
        if warning := _warned(run):
            said = f"no step was committed yet; {warning}. Training goes on"
            return ConditionState("False", "SidecarTroubled", said)
        return ConditionState("Unknown", "NothingCommitted", "no step was committed yet")
    return ConditionState(
        "True",
        COMMITTING,
        f"step {run.commit.id.step} became committed at {utc(run.commit.at)};"
        f" {run.behind or 0} steps are staged and not committed",
    )


def _what_hinders(run: RunView) -> str:
    """The likeliest reason why no step becomes committed, and where to look."""
    logs = f"kubectl logs -n {run.key.namespace}"
    absent = sorted(pod.name for pod in run.pods.values() if not pod.injected)
    if absent:
        return f"Pods without a sidecar: {few(absent)}. Delete them, their job makes them again"
    if run.health.silent:
        pods = sorted(run.health.silent)
        return f"Sidecars that do not report: {few(pods)}; {logs} {pods[0]} -c keepstep-sidecar"
    if warning := _warned(run):
        said = f"{warning[0].upper()}{warning[1:]}"
        return f"{said}. Training goes on; a restart goes back to the last commit"
    if run.slowest:
        return (
            f"Pod {run.slowest} holds the oldest step on its volumes; {logs} {run.slowest} -c"
            " keepstep-sidecar. Training goes on; a restart goes back to the last commit"
        )
    return f"{logs} POD -c keepstep-sidecar says more. Training goes on"


def _warned(run: RunView) -> str:
    """The first warning of the sidecar with the lowest node rank that has one; '' if none has."""
    for place in run.places.values():
        pod = run.pods.get(place.pod)
        if pod is not None and place.sidecar.warnings:
            return f"the sidecar of {pod.name} says: {place.sidecar.warnings[0]}"
    return ""
