"""Conditions about what lies beyond a run's own nodes: `Replicated`, `Archived`, `RestoreFrom`,
`LeftShardsServed`. Pure.

Each is None, and so not shown, if nothing asks for it: neither the policy, nor `spec.restoreFrom`,
nor shards that are needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.steps import Tier
from keepstep_operator import names
from keepstep_operator.api.run import RestoreFromStatus, cut
from keepstep_operator.reconcile.state.restore_request import Stage
from keepstep_operator.reconcile.state.run_view import RunView
from keepstep_operator.reconcile.status.condition import NO_REPORTS, OVER, ConditionState, few

REPLICATED = "Replicated"
ARCHIVED = "Archived"
RESTORE_FROM = "RestoreFrom"
LEFT_SERVED = "LeftShardsServed"

BEHIND_S = {Tier.PEER: 300.0, Tier.ARCHIVE: 1800.0}
"""How long a shard may wait to be sent before the condition says so."""
_TEXT = 300


def replicated(run: RunView) -> ConditionState | None:
    """Whether a step of the run survives the loss of any one node, through copies on peers."""
    if run.policy is None or run.policy.peers is None:
        return None
    if (early := _early(run)) is not None:
        return early
    if nodes := _only_node(run):
        said = (
            f"all pods are on node {nodes}: a copy needs another node. Spread the pods of the job"
        )
        return ConditionState("False", "OneNode", said)
    if (troubled := _troubled(run, Tier.PEER)) is not None:
        return troubled
    if mute := sorted(_without_address(run)):
        said = f"{few(mute)} do not serve their peers yet, so no copy can be sent to them"
        return ConditionState("Unknown", "NotServing", said)
    safe = run.safety.step
    if safe is None:
        return ConditionState("Unknown", "NothingReplicated", "no step lies on two nodes whole yet")
    return ConditionState("True", REPLICATED, f"step {safe.step} is left whichever node is lost")


def archived(run: RunView) -> ConditionState | None:
    """Whether steps reach the archive."""
    if run.policy is None or run.policy.archive is None:
        return None
    newest = run.safety.archived
    if newest is None and (early := _early(run)) is not None:
        return early
    if not run.finished and (troubled := _troubled(run, Tier.ARCHIVE)) is not None:
        return troubled
    archive = run.policy.archive
    if newest is None:
        said = f"no step is in {archive.where} yet; the steps that {archive.every} divides go there"
        return ConditionState("Unknown", "NothingArchived", said)
    count = len(run.archived)
    more = f", and {count - 1} older" if count > 1 else ""
    return ConditionState("True", ARCHIVED, f"step {newest.step} is in {archive.where}{more}")


def restore_from(run: RunView) -> ConditionState | None:
    """The state of spec.restoreFrom."""
    asked = run.restore_from
    if asked is None:
        return None
    if run.restore_stage is Stage.UNRESOLVED:
        return _unresolved(run, asked)
    step = run.restore_step.step if run.restore_step else 0
    if run.restore_stage is Stage.DONE:
        said = f"epoch {asked.epoch} went on from step {step}; later restarts are as usual"
        return ConditionState("True", "Restored", said)
    if not run.restore_known:
        said = f"not all sidecars know yet that the run is to go back to step {step}: wait for them"
        return ConditionState("Unknown", "Telling", said)
    return ConditionState(
        "Unknown",
        "Waiting",
        f"the next restart goes on from step {step} ({asked.step}), and the steps beyond it"
        " are dead then: restart the job now; empty spec.restoreFrom to take it back",
    )


def _unresolved(run: RunView, asked: RestoreFromStatus) -> ConditionState:
    wanted = cut(asked.asked, longest=128)
    if asked.run:
        return ConditionState(
            "False",
            "OtherRun",
            f"{wanted} is of another run, and this one has begun already: a new job begins from"
            f" there with the annotation {names.RESTORE_FROM_ANNOTATION} on its pods. Restarts are"
            " as usual",
        )
    if not run.places:
        return ConditionState(
            "Unknown", "NoReports", "no sidecar has told yet which steps there are"
        )
    known = few([str(id) for id in run.commits[-3:]])
    return ConditionState(
        "False",
        "NotFound",
        f"no step {wanted} that every rank holds is known"
        + (f"; there is {known}" if known else "; name it with its full id")
        + ". Restarts are as usual until it is found",
    )


def left_served(run: RunView) -> ConditionState | None:
    """Whether shards that pods left on another node can be reached. Shown only while they are
    needed."""
    if run.finished or not (run.unserved or run.served):
        return None
    if run.unserved:
        return ConditionState("False", "NoAgent", cut(run.unserved))
    return ConditionState("True", "Served", cut(run.served))


def _early(run: RunView) -> ConditionState | None:
    if run.finished:
        return OVER
    return None if run.places else NO_REPORTS


def _only_node(run: RunView) -> str:
    """The node that all pods are on; '' if there are several, or none is known."""
    nodes = {pod.node for pod in run.pods.values() if not pod.over}
    return next(iter(nodes)) if len(nodes) == 1 else ""


def _without_address(run: RunView) -> Iterator[str]:
    for place in run.places.values():
        pod = run.pods.get(place.pod)
        if pod is not None and not pod.over and not place.sidecar.peer_address:
            yield pod.name


def _troubled(run: RunView, tier: Tier) -> ConditionState | None:
    """The trouble that a sidecar reports with this tier while shards wait to be sent there. Trouble
    with the archive counts even if none wait: those that waited may have been retired."""
    waiting = [
        (run.pods[place.pod].name, place.sidecar.tiers[tier])
        for place in run.places.values()
        if place.pod in run.pods and not place.gone and tier in place.sidecar.tiers
    ]
    for pod, one in waiting:
        if one.trouble and (one.backlog or tier.shared):
            said = f"the sidecar of {pod} says: {cut(one.trouble, longest=_TEXT)}"
            return ConditionState("False", "Troubled", f"{said}. {_rest(run, tier)}")
    for pod, one in waiting:
        if one.backlog and one.behind_s >= BEHIND_S[tier]:
            said = f"shards of {pod} wait to be sent to {cut(one.where, longest=_TEXT)} for long"
            return ConditionState("False", "Behind", f"{said}. {_rest(run, tier)}")
    return None


def _rest(run: RunView, tier: Tier) -> str:
    """The end of the message. It has no number that changes with each report, since every change is
    written to the API server."""
    catches_up = "It is tried again until it works; training goes on"
    if tier is Tier.ARCHIVE:
        newest = run.safety.archived
        return f"{catches_up}. Newest step there: {newest.step if newest else 'none'}"
    return catches_up
