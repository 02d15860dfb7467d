"""CheckpointPolicy.status: the condition Accepted, with what to change. Pure."""

from __future__ import annotations

import msgspec

from keepstep_operator import names
from keepstep_operator.api.model import Job, PolicyRecord, RunKey
from keepstep_operator.api.run import Condition, utc
from keepstep_operator.bodies import Body
from keepstep_operator.reconcile.state.actions import EmitEvent

ACCEPTED = "Accepted"


def policy_status(policy: PolicyRecord, before: Body, *, at: float) -> Body | None:
    """The status to write over `before`; None when that says the same."""
    condition = _condition(policy)
    known = _known(before)
    if known is not None and known.status == condition.status:
        condition = msgspec.structs.replace(
            condition, last_transition_time=known.last_transition_time
        )
    else:
        condition = msgspec.structs.replace(condition, last_transition_time=utc(at))
    status: Body = {
        "observedGeneration": policy.generation,
        "conditions": [msgspec.to_builtins(condition)],
    }
    return None if status == before else status


def problem_event(policy: PolicyRecord) -> EmitEvent | None:
    """Tells whoever looks at a policy that is not accepted."""
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


def _condition(policy: PolicyRecord) -> Condition:
    if policy.problem is not None:
        reason, message = policy.problem
        status = "False"
        message = f"{message}. Pods that ask for it start without keepstep until it is changed"
    else:
        status, reason, message = "True", ACCEPTED, policy.advice
    return Condition(
        type=ACCEPTED,
        status=status,
        reason=reason,
        message=message,
        observed_generation=policy.generation,
    )


def _known(status: Body) -> Condition | None:
    for one in status.get("conditions") or []:
        if one.get("type") == ACCEPTED:
            try:
                return msgspec.convert(one, Condition)
            except msgspec.ValidationError:
                return None
    return None
