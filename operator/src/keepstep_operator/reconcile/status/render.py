"""CheckpointRun.status from a run's state: a pure function, called when it is time to write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from keepstep.core.commit_rule import bits
from keepstep.steps import Tier
from keepstep_operator import names
from keepstep_operator.api.model import PolicyRecord
from keepstep_operator.api.policy import Policy
from keepstep_operator.api.run import (
    MOST_RANKS,
    MOST_WARNINGS,
    CommittedStatus,
    Condition,
    JobStatus,
    MemoryStatus,
    PlaceStatus,
    PolicyStatus,
    RunStatus,
    StartStatus,
    cut,
    utc,
)
from keepstep_operator.reconcile.state.messages import acknowledge, draining
from keepstep_operator.reconcile.state.previous_status import FINISHED
from keepstep_operator.reconcile.state.run_view import RunView
from keepstep_operator.reconcile.status.condition import ConditionState, since
from keepstep_operator.reconcile.status.conditions import PROTECTED, condition_states
from keepstep_operator.reconcile.status.node_holders import holders
from keepstep_operator.reconcile.status.tier_conditions import ARCHIVED
from keepstep_operator.spans import spans

_NODES_NAMED = 5
_TEXT = 300
_WITHOUT_REPORTS = (
    "observed_generation", "phase", "job", "job_name", "nodes", "start", "protected", "recent",
    "warnings", "conditions",
)  # fmt: skip
"""The fields that are written although no sidecar has reported. All others stay as an earlier
reconciler wrote them."""


def render(run: RunView, *, at: float) -> RunStatus:
    """The whole status as it should be now. It contains no ages and no "now", so it changes only
    when the run does."""
    said = condition_states(run)
    survived = [str(one) for one in run.survives]
    status = RunStatus(
        observed_generation=run.generation,
        phase=_phase(run),
        job=_job(run),
        job_name=run.job.name if run.job else "",
        policy=_policy(run),
        start=_start(run),
        sidecar_image=_newest(pod.sidecar_image for pod in run.pods.values()),
        sidecar_version=_versions(one.sidecar.version for one in run.places.values()),
        library_version=_versions(one.sidecar.library for one in run.places.values()),
        world=run.world,
        nodes=_pods(run),
        epoch=str(run.epoch or ""),
        origin=cut(run.origin, longest=128),
        step=run.step,
        committed=_committed(run),
        behind=run.behind,
        watermarks={str(tier): str(id) for tier, id in run.watermarks.items()},
        tiers=",".join(map(str, run.tiers)),
        nodes_summary=_nodes(run),
        survives=survived,
        survives_summary=",".join(survived),
        protected=said[PROTECTED].status,
        pinned=_pinned(run),
        memory=MemoryStatus(slots=run.policy.slots) if run.policy else None,
        stall=run.stall,
        restarts=run.restarts,
        lost_steps=run.lost_steps,
        goodput=run.goodput,
        recent=list(run.recent),
        ranks=_ranks(run),
        holders=holders(run),
        drives=list(run.drives),
        restore_from=run.restore_from,
        warnings=_warnings(run),
        conditions=_conditions(run, said, at),
    )
    if run.past is None or run.places:
        return status
    now = {name: getattr(status, name) for name in _WITHOUT_REPORTS}
    if run.finished and run.past.phase == FINISHED:
        now["conditions"] = _as_it_ended(run.past.conditions, status.conditions)
    return msgspec.structs.replace(run.past, **now)


def _as_it_ended(before: list[Condition], now: list[Condition]) -> list[Condition]:
    """The conditions of a finished run. No sidecar reports any more where its steps lie, so its
    former conditions `Protected` and `Archived` stand."""
    stands = {one.type: one for one in before if one.type in (PROTECTED, ARCHIVED)}
    return [*(stands.pop(one.type, one) for one in now), *stands.values()]


def _start(run: RunView) -> StartStatus | None:
    """The sidecar that the run's oldest staying pod started with. None if no pod stays: the next
    one then starts with the sidecar that is current then."""
    staying = (pod for pod in run.pods.values() if pod.stays)
    first = min(staying, key=lambda pod: (pod.created_at, pod.name), default=None)
    if first is None:
        return None
    return StartStatus(image=first.sidecar_image, version=first.sidecar_version)


def _pods(run: RunView) -> int:
    return sum(not pod.over for pod in run.pods.values()) or len(run.pods)


def _phase(run: RunView) -> str:
    if run.finished:
        return FINISHED
    if not run.places:
        return "Waiting"
    if run.world and run.alive >= run.world:
        return "Running"
    return "Restoring" if run.step or run.commit else "Waiting"


def _job(run: RunView) -> JobStatus | None:
    if run.job is None:
        return None
    return JobStatus(
        api_version=run.job.api_version, kind=run.job.kind, name=run.job.name, uid=run.job.uid
    )


def _policy(run: RunView) -> PolicyStatus | None:
    if run.policy is None:
        return None
    return PolicyStatus(
        name=run.policy.name, generation=run.policy.generation, spec=dict(run.policy.spec)
    )


def _committed(run: RunView) -> CommittedStatus | None:
    if run.commit is None:
        return None
    id = run.commit.id
    return CommittedStatus(step=id.step, id=str(id), time=utc(run.commit.at))


def _nodes(run: RunView) -> str:
    nodes = sorted({pod.node for pod in run.pods.values() if pod.node})
    more = len(nodes) - _NODES_NAMED
    return ",".join(nodes[:_NODES_NAMED]) + (f",+{more}" if more > 0 else "")


def _pinned(run: RunView) -> str:
    said = sorted({place.sidecar.pinned for place in run.places.values()} - {""})
    loose = [text for text in said if text.startswith("no")]
    return cut((loose or said or [""])[0], longest=_TEXT)


def _ranks(run: RunView) -> list[PlaceStatus]:
    return [
        PlaceStatus(
            node=place.node,
            pod=run.pods[place.pod].name if place.pod in run.pods else "",
            node_rank=node_rank,
            ranks=spans(bits(place.own)),
            memory=run.newest.get((node_rank, Tier.MEMORY)),
            local=run.newest.get((node_rank, Tier.LOCAL)),
            buddies=spans(run.buddies.get(node_rank, ())),
        )
        for node_rank, place in islice(run.places.items(), MOST_RANKS)
    ]


def _newest(texts: Iterable[str]) -> str:
    return max((text for text in texts if text), default="")


def _versions(texts: Iterable[str]) -> str:
    return cut(", ".join(sorted({text for text in texts if text})), longest=128)


# --- warnings and conditions -----------------------------------------------------------------


def _warnings(run: RunView) -> list[str]:
    return [cut(text) for text in dict.fromkeys(_all_warnings(run))][:MOST_WARNINGS]


def _all_warnings(run: RunView) -> Iterator[str]:
    """All warnings, the one to act on first first."""
    if run.policy is not None and not run.finished:
        yield from _of_policy(run.policy, run.policy_now)
    if run.fresh is not None:
        yield f"epoch {run.fresh} began at step 0 beside older steps. {acknowledge(run.key)}"
    if run.earlier is not None and not run.finished:
        yield (
            f"an earlier job of this name was run {run.earlier.name}; its steps are kept, but this"
            f" job does not go on from them. To do so, make it with the label {names.RUN_LABEL}:"
            f" {run.earlier.name} on its pods"
        )
    yield from run.rivals
    yield from run.alarms
    for pod in sorted(run.pods.values(), key=lambda pod: pod.name):
        if pod.trouble and pod.injected:
            yield f"pod {pod.name}: {pod.trouble}"
    for node in sorted(run.health.draining):
        yield draining(node, run.commit.id.step if run.commit else None)
    for text, pods in sorted(_said(run).items()):
        yield f"{text} ({_first(pods)})"


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


def _said(run: RunView) -> dict[str, list[str]]:
    """The warnings of injection and of sidecars, each with the names of its pods."""
    said: dict[str, list[str]] = {}
    for one in run.pods.values():
        for text in one.warnings if one.stays else ():
            said.setdefault(text, []).append(one.name)
    for place in run.places.values():
        pod = run.pods.get(place.pod)
        if pod is not None:
            for text in place.sidecar.warnings[:MOST_WARNINGS]:
                said.setdefault(cut(text, longest=_TEXT), []).append(pod.name)
    return said


def _first(pods: Collection[str]) -> str:
    first, more = min(pods), len(pods) - 1
    return f"pod {first} and {more} more" if more else f"pod {first}"


def _conditions(run: RunView, said: Mapping[str, ConditionState], at: float) -> list[Condition]:
    before = {one.type: one for one in run.conditions}
    return [
        Condition(
            type=type,
            status=verdict.status,
            reason=verdict.reason,
            message=cut(verdict.message),
            observed_generation=run.generation,
            last_transition_time=since(before.get(type), verdict.status, at),
        )
        for type, verdict in said.items()
    ]
