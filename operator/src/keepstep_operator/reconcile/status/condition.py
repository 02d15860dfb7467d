"""A condition without its times, and lists of names in sentences."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from keepstep_operator.api.run import Condition, utc
from keepstep_operator.reconcile.state.previous_status import FINISHED

_NAMED = 3


@dataclass(frozen=True)
class ConditionState:
    """A condition without its times. `status`: True, False or Unknown."""

    status: str
    reason: str
    message: str


OVER = ConditionState("Unknown", FINISHED, "the job is over")
NO_REPORTS = ConditionState("Unknown", "NoReports", "no sidecar has reported yet")


def few(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    named = sorted(names)[:_NAMED]
    more = len(names) - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def and_more(names: Collection[str]) -> str:
    """The end of a sentence about the first of these pods; '' if there is only one."""
    return f" (the same holds for {len(names) - 1} more pods)" if len(names) > 1 else ""


def since(before: Condition | None, status: str, at: float) -> str:
    """The time of the last transition. Only a change of status is one; reasons and messages may
    change at any time."""
    if before is not None and before.status == status and before.last_transition_time:
        return before.last_transition_time
    return utc(at)
