"""CheckpointPolicy.status: the condition Accepted, which says what to change. Pure."""

from __future__ import annotations

import msgspec

from keepstep_operator import names
from keepstep_operator.api.model import Job, PolicyRecord, RunKey
from keepstep_operator.api.run import Condition
from keepstep_operator.bodies import Body
from keepstep_operator.reconcile.state.actions import EmitEvent
from keepstep_operator.reconcile.status.condition import since

ACCEPTED = "Accepted"


def policy_status(policy: PolicyRecord, before: Body, *, at: float) -> Body | None:
    """The status to replace `before`; None if it is the same."""
    status, reason, message = "True", ACCEPTED, policy.advice
    if policy.problem is not None:
        status, (reason, message) = "False", policy.problem
        message += ". Pods that ask for it start without keepstep until it is changed"
    condition = Condition(
        type=ACCEPTED,
        status=status,
        reason=reason,
        message=message,
        observed_generation=policy.generation,
        last_transition_time=since(_known(before), status, at),
    )
    now: Body = {
        "observedGeneration": policy.generation,
        "conditions": [msgspec.to_builtins(condition)],
    }
    return None if now == before else now


def problem_event(policy: PolicyRecord) -> EmitEvent | None:
    """The event on a policy that is not accepted; None if it is."""
    if policy.problem is None:
        return None
    about = Job(
        api_version=names.API_VERSION,
        kind="CheckpointPolicy",
        name=policy.name,
        uid=policy.uid,
    )
    reason, message = policy.problem
    return EmitEvent(
        run=RunKey(policy.namespace, f"policy {policy.name}"),
        about=about,
        reason=reason,
        message=message,
        warning=True,
        topic=str(policy.generation),
        period_s=3600.0,
    )


def _known(status: Body) -> Condition | None:
    for one in status.get("conditions") or []:
        if one.get("type") == ACCEPTED:
            try:
                return msgspec.convert(one, Condition)
            except msgspec.ValidationError:
                return None
    return None
