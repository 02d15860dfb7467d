"""The conditions of a run, worded for the person who is on call. Pure.

What only the leader can see comes as doubts, each of which belongs to one condition (`_DOUBTS`).
What only the cluster shows is looked up here. `Protected` sums all up: True means that a crash now
would cost little. Its checks are ordered: the problem to act on first comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from keepstep.spans import is_in_spans
from keepstep.wire.run_reports import Advisory, AdvisoryKind, RunReport
from keepstep_operator import names
from keepstep_operator.api.cluster_objects import PodRecord
from keepstep_operator.api.quantities import format_bytes
from keepstep_operator.api.run_status import cut_text
from keepstep_operator.reconcile import pod_texts
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts
from keepstep_operator.reconcile.pod_texts import and_more, few
from keepstep_operator.reconcile.run_transitions import FINISHED, Run
from keepstep_operator.reconcile.survival import Survives, find_survivable_failures

SILENT_S: Final = 90.0
"""The leader is silent after this time: three missed reports."""

PROTECTED: Final = "Protected"
FULLY_INJECTED: Final = "FullyInjected"
DUPLICATE_NODE_RANK: Final = "DuplicateNodeRank"
RESTORE_REFUSED: Final = "RestoreRefused"
COUNTED_BY_QUEUE: Final = "CountedByQueue"
COMMITTING: Final = "Committing"
REPLICATED: Final = "Replicated"
ARCHIVED: Final = "Archived"
RESTORE_FROM: Final = "RestoreFrom"
LEFT_SERVED: Final = "LeftShardsServed"

_DOUBTS: Final = {
    AdvisoryKind.COMMIT_STALLED: (COMMITTING, "False", "CommitStalled"),
    AdvisoryKind.COMMIT_LOST: (COMMITTING, "False", "PartGone"),
    AdvisoryKind.SIDECAR_TROUBLED: (COMMITTING, "False", "SidecarTroubled"),
    AdvisoryKind.RESTORE_REFUSED: (RESTORE_REFUSED, "True", RESTORE_REFUSED),
    AdvisoryKind.NOTHING_KEPT: (PROTECTED, "False", "NothingKept"),
    AdvisoryKind.PART_GONE: (PROTECTED, "False", "PartGone"),
    AdvisoryKind.PEERS_TROUBLED: (REPLICATED, "False", "Troubled"),
    AdvisoryKind.PEERS_BEHIND: (REPLICATED, "False", "Behind"),
    AdvisoryKind.PEERS_NOT_SERVING: (REPLICATED, "Unknown", "NotServing"),
    AdvisoryKind.ARCHIVE_TROUBLED: (ARCHIVED, "False", "Troubled"),
    AdvisoryKind.ARCHIVE_BEHIND: (ARCHIVED, "False", "Behind"),
    AdvisoryKind.LEFT_NOT_SERVED: (LEFT_SERVED, "False", "NoAgent"),
    AdvisoryKind.LEFT_SERVED: (LEFT_SERVED, "True", "Served"),
    AdvisoryKind.RANKS_ABSENT: (FULLY_INJECTED, "False", "RanksWithoutSidecar"),
}
"""By kind of doubt: the condition that it decides, its status and its reason."""


@dataclass(frozen=True)
class ConditionState:
    """A condition without its times. `status`: True, False or Unknown."""

    status: str
    reason: str
    message: str


_OVER: Final = ConditionState("Unknown", FINISHED, "the job is over")
_NO_REPORTS: Final = ConditionState("Unknown", "NoReports", "no sidecar has reported yet")


def condition_states(run: Run, cluster: ClusterFacts, *, now: float) -> dict[str, ConditionState]:
    """The conditions by type, in the order in which they are shown, without those that do not apply
    to this run."""
    found = {
        FULLY_INJECTED: _fully_injected(run),
        DUPLICATE_NODE_RANK: _duplicate_node_rank(run),
        RESTORE_REFUSED: None if run.finished_at else _doubted(run, RESTORE_REFUSED),
        COUNTED_BY_QUEUE: _counted_by_queue(run),
        COMMITTING: _committing(run),
        REPLICATED: _replicated(run),
        ARCHIVED: _archived(run),
        RESTORE_FROM: _restore_from(run),
        LEFT_SERVED: None if run.finished_at else _doubted(run, LEFT_SERVED),
    }
    problems = (
        _finished(run),
        _unheard(run),
        _failing(found[FULLY_INJECTED]),
        _as_false(found[DUPLICATE_NODE_RANK]),
        _as_false(found[RESTORE_REFUSED]),
        _without_library(run, now),
        _silent(run, now),
        _doubted(run, PROTECTED),
        *(_failing(found[kind]) for kind in (COMMITTING, REPLICATED, ARCHIVED)),
    )
    verdict = ConditionState("True", PROTECTED, _what_is_kept(run, cluster))
    protected = next((problem for problem in problems if problem is not None), verdict)
    shown = {kind: verdict for kind, verdict in found.items() if verdict is not None}
    return {PROTECTED: protected, **shown}


def _failing(verdict: ConditionState | None) -> ConditionState | None:
    return verdict if verdict is not None and verdict.status == "False" else None


def _as_false(verdict: ConditionState | None) -> ConditionState | None:
    return None if verdict is None else replace(verdict, status="False")


def _doubted(run: Run, kind: str) -> ConditionState | None:
    """What the first doubt about this condition says; None: there is none."""
    for doubt in current_advisories(run):
        of, status, reason = _DOUBTS[doubt.kind]
        if of == kind:
            return ConditionState(status, reason, cut_text(doubt.text))
    return None


def current_advisories(run: Run) -> tuple[Advisory, ...]:
    """What the leader doubts now."""
    return run.report.doubts if run.report is not None else ()


# --- Protected: each of these is None if there is nothing to act on ------------------------------


def _finished(run: Run) -> ConditionState | None:
    if run.finished_at is None:
        return None
    how = next((event.message for event in run.recent if event.type == FINISHED), "the job is over")
    how = how.partition(";")[0]
    if run.committed is None:
        return ConditionState("Unknown", FINISHED, f"{how}; no step of it was committed")
    message = f"{how}; its last committed step is {run.committed.step}"
    if run.volumes_outlive_pod:
        message += (
            ". It stays on the volumes of its nodes; a new job goes on from it when its pods carry"
            f" the label {names.RUN_LABEL}: {run.key.name}"
        )
    return ConditionState("Unknown", FINISHED, message)


def _unheard(run: Run) -> ConditionState | None:
    if run.report is not None:
        return None
    pods = list(run.job_pods)
    if not pods:
        return ConditionState("Unknown", "NoPods", "no pod of this run exists")
    ranks = [pod.node_rank for pod in pods if pod.injected]
    if not ranks:
        return None
    if min(ranks):
        message = "no pod of node rank 0, which leads the run, has a sidecar: annotate it, too"
        return ConditionState("Unknown", "NoLeader", message)
    troubled = [f"; pod {pod.name} is {pod.trouble}" for pod in pods if pod.trouble]
    return ConditionState(
        "Unknown",
        "NoReports",
        f"no sidecar of its {len(pods)} pods has reported yet{min(troubled, default='')}. If"
        f" this does not change, see kubectl logs -n {run.key.namespace} POD -c keepstep-sidecar,"
        " first of the pod with node rank 0",
    )


def _duplicate_node_rank(run: Run) -> ConditionState | None:
    """None if every pod that stays has its own node rank."""
    by_rank: dict[int, list[str]] = {}
    for pod in run.job_pods:
        if pod.is_active:
            by_rank.setdefault(pod.node_rank, []).append(pod.name)
    twice = {rank: pods for rank, pods in by_rank.items() if len(pods) > 1}
    if not twice:
        return None
    rank = min(twice)
    return ConditionState("True", DUPLICATE_NODE_RANK, pod_texts.same_rank_text(rank, twice[rank]))


def pods_without_library(run: Run, now: float) -> list[str]:
    """The names of pods whose training container runs, and to whose sidecar no trainer came."""
    report = run.report
    if report is None or not report.without_library:
        return []
    return sorted(
        pod.name
        for pod in run.job_pods
        if _trains(pod, now, pod_texts.LIBRARY_S)
        and is_in_spans(report.without_library, pod.node_rank)
    )


def _trains(pod: PodRecord, now: float, for_s: float) -> bool:
    return pod.is_active and pod.training_since is not None and now - pod.training_since >= for_s


def _without_library(run: Run, now: float) -> ConditionState | None:
    pods = pods_without_library(run, now)
    if not pods:
        return None
    message = pod_texts.describe_missing_trainer(pods[0]) + and_more(pods)
    return ConditionState("False", "LibraryMissing", message)


def _silent(run: Run, now: float) -> ConditionState | None:
    """None while the leader reports, and all members to it."""
    report = run.report
    if report is None or run.idle_since is not None:
        return None
    leads = now - run.reported_at >= SILENT_S
    pods = sorted(
        pod.name
        for pod in run.job_pods
        if _trains(pod, now, SILENT_S)
        and (pod.node_rank == 0 if leads else is_in_spans(report.missing, pod.node_rank))
    )
    if not pods:
        return None
    return ConditionState(
        "Unknown",
        "SidecarsSilent",
        f"no report for more than {SILENT_S:.0f} s from the sidecars of {few(pods)}: this"
        " status is that of the last report. Training and restarts do not depend on reports. See"
        f" kubectl logs -n {run.key.namespace} {pods[0]} -c keepstep-sidecar",
    )


def draining_sole_holders(run: Run, cluster: ClusterFacts) -> list[str]:
    """The cordoned nodes that hold the only copy of some part of the newest commit."""
    if run.report is None or run.finished_at is not None:
        return []
    nodes = (cluster.nodes.get(name) for name in run.report.safe.sole)
    return sorted(node.name for node in nodes if node is not None and node.cordoned)


def _what_is_kept(run: Run, cluster: ClusterFacts) -> str:
    report = run.report
    if report is None:
        return "no report of the run has arrived yet"
    restart = report.safe.restart.step if report.safe.restart else 0
    sentences = [f"the restart of a container goes on from step {restart}", *_of_a_pod(run, report)]
    outlived = find_survivable_failures(run)
    if Survives.JOB_RECREATE not in outlived and Survives.POD_RESTART in outlived:
        sentences.append(
            "a new job begins at step 0, unless its pods carry the label keepstep.dev/run"
        )
    sentences += [
        pod_texts.cordoned_sole_copy_text(node, None)
        for node in draining_sole_holders(run, cluster)
    ]
    return "; ".join(sentences)


def _of_a_pod(run: Run, report: RunReport) -> Iterator[str]:
    """What the loss of a pod or its node costs."""
    safe, committed = report.safe, report.committed
    if run.volumes_outlive_pod and committed is not None:
        yield f"a pod that comes back to its node goes on from step {committed.step} or newer"
    if safe.node is not None:
        where = " in the archive" if safe.node == safe.archived else ""
        yield f"the loss of a pod or its node goes back to step {safe.node.step}{where}"
    elif run.volumes_outlive_pod and committed is None:
        yield "nothing is committed yet: a pod that is deleted takes its part with it"
    elif run.volumes_outlive_pod:
        yield "a node that is lost takes its part with it"
    elif safe.pod is not None:
        yield (
            f"a pod that is deleted or moved goes on from step {safe.pod.step} or newer, which the"
            " other pods have"
        )
    else:
        kinds = ", ".join(sorted({str(kind) for kind in run.volumes})) or "none"
        again = run.policy is None or run.policy.starts_fresh_after_loss or report.known <= 1
        then = "begins at step 0" if again else "waits for a person (onLoss: Wait)"
        yield (
            f"a pod that is deleted or moved takes its part with it, and the run then {then}"
            f" (volumes: {kinds}; hostPath outlives pods)"
        )


# --- the others ----------------------------------------------------------------------------------


def _fully_injected(run: Run) -> ConditionState:
    if run.finished_at is not None:
        return _OVER
    pods = [pod for pod in run.job_pods if not pod.over]
    if not pods:
        return ConditionState("Unknown", "NoPods", "no pod of this run exists")
    without = sorted((pod for pod in pods if not pod.injected), key=lambda pod: pod.name)
    if without:
        message = pod_texts.not_injected_text(without[0]) + and_more([pod.name for pod in without])
        return ConditionState("False", "NotInjected", message)
    all_have = ConditionState("True", "AllInjected", f"all {len(pods)} pods have the sidecar")
    return _doubted(run, FULLY_INJECTED) or all_have


def _counted_by_queue(run: Run) -> ConditionState | None:
    """None if no queue is involved, or if it counts all that the pods request."""
    policy = run.policy
    if policy is None or not policy.added_bytes:
        return None
    if not any(pod.uncounted and pod.is_active for pod in run.job_pods):
        return None
    message = (
        f"Kueue admitted the job by its template; policy {policy.name} (accounting: Add) adds"
        f" {format_bytes(policy.added_bytes)} of memory to each of its pods, which no quota counts,"
        " so pods may not find the place that the queue believes to be free. Set"
        " accounting: CarveOut, and raise the training container's memory by as much"
    )
    return ConditionState("False", "MemoryAdded", message)


def _committing(run: Run) -> ConditionState:
    if (early := _early(run)) is not None:
        return early
    if (doubted := _doubted(run, COMMITTING)) is not None:
        twice = _duplicate_node_rank(run)
        stalled = doubted.reason == str(AdvisoryKind.COMMIT_STALLED)
        return replace(doubted, message=twice.message) if twice and stalled else doubted
    if run.committed is None:
        return ConditionState("Unknown", "NothingCommitted", "no step was committed yet")
    behind = run.report.behind if run.report is not None else None
    return ConditionState(
        "True",
        COMMITTING,
        f"step {run.committed.step} became committed at {run.committed.time};"
        f" {behind or 0} steps are staged and not committed",
    )


def _replicated(run: Run) -> ConditionState | None:
    """Whether a step of the run survives the loss of any one node, through copies on peers."""
    if run.policy is None or run.policy.peers is None:
        return None
    if (early := _early(run)) is not None:
        return early
    nodes = {pod.node for pod in run.job_pods if not pod.over}
    if len(nodes) == 1 and (node := next(iter(nodes))):
        message = (
            f"all pods are on node {node}: a copy needs another node. Spread the pods of the job"
        )
        return ConditionState("False", "OneNode", message)
    if (doubted := _doubted(run, REPLICATED)) is not None:
        return doubted
    safe = run.report.safe.node if run.report is not None else None
    if safe is None:
        return ConditionState("Unknown", "NothingReplicated", "no step lies on two nodes whole yet")
    return ConditionState("True", REPLICATED, f"step {safe.step} is left whichever node is lost")


def _archived(run: Run) -> ConditionState | None:
    """Whether steps reach the archive."""
    if run.policy is None or run.policy.archive is None:
        return None
    newest = run.report.safe.archived if run.report is not None else None
    if newest is None and (early := _early(run)) is not None:
        return early
    if run.finished_at is None and (doubted := _doubted(run, ARCHIVED)) is not None:
        return doubted
    archive = run.policy.archive
    if newest is None:
        message = f"no step is in {archive.where} yet; those that {archive.every} divides go there"
        return ConditionState("Unknown", "NothingArchived", message)
    count = run.report.archived if run.report is not None else 0
    more = f", and {count - 1} older" if count > 1 else ""
    return ConditionState("True", ARCHIVED, f"step {newest.step} is in {archive.where}{more}")


def _early(run: Run) -> ConditionState | None:
    if run.finished_at is not None:
        return _OVER
    return None if run.report is not None else _NO_REPORTS


def _restore_from(run: Run) -> ConditionState | None:
    """The state of spec.restoreFrom. None if nothing is asked."""
    asked = run.object.restore_from if run.object is not None else ""
    if not asked:
        return None
    known, requested = run.record.restore_from, cut_text(asked, longest=128)
    if run.report is None:
        return ConditionState("Unknown", "NoReports", "no sidecar has reported the run's steps yet")
    if known is None or known.asked != asked:
        return ConditionState(
            "Unknown", "Propagating", f"the run's sidecars do not know {requested} yet"
        )
    if known.run:
        return ConditionState(
            "False",
            "OtherRun",
            f"{requested} belongs to another run, and this run has begun: a new job begins from"
            f" there with the annotation {names.RESTORE_FROM_ANNOTATION} on its pods. Restarts are"
            " as usual",
        )
    if known.epoch:
        message = f"epoch {known.epoch} went on from step {known.step}; later restarts are as usual"
        return ConditionState("True", "Restored", message)
    if not known.step:
        steps = few([str(step) for step in run.report.commits[-3:]])
        return ConditionState(
            "False",
            "NotFound",
            f"step {requested} is not known, or not held by every rank"
            + (f"; there is {steps}" if steps else "; name it with its full id")
            + ". Restarts are as usual until the step is found",
        )
    if not run.report.restore_known:
        message = f"not all sidecars know yet that the run is to go back to step {known.step}"
        return ConditionState("Unknown", "Propagating", f"{message}: wait for them")
    return ConditionState(
        "Unknown",
        "Waiting",
        f"the next restart goes on from step {known.step}, and the steps beyond it"
        " are dead then: restart the job now; empty spec.restoreFrom to take it back",
    )
