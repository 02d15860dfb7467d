"""A person wants the next epoch of the run to begin from a certain step. Pure.

The request is for one restart. It is done once an epoch has begun whose parent is that step; the
record says so. Later epochs go on from the newest step again, until something else is asked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import replace

from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.run_reports import RestoreFromState

_TARGET = re.compile(
    r"(?:([a-z0-9][-a-z0-9]*)/)?(?:([0-9]{1,18})|([0-9]{4,9}\.[0-9a-f]{8}-[0-9]+))"
)


def parse_restore_request(
    known: RestoreFromState | None, text: str, *, own: str, newest: EpochId | None
) -> RestoreFromState | None:
    """The request that `text` makes, in place of the `known` one. `own`: the run's name. `newest`:
    its present epoch."""
    if not text or (known is not None and text == known.asked):
        return known if text else None
    named = _TARGET.fullmatch(text)
    other = named[1] if named and named[1] not in (None, own) else ""
    return RestoreFromState(asked=text, run=other, since=newest.number if newest else 0)


def resolve_restore_request(
    asked: RestoreFromState, held: Iterable[StepId], epochs: Iterable[Epoch]
) -> RestoreFromState:
    """The request with the step that it means, and the epoch that began from there, as far as they
    are known. `held`: the committed steps. No sidecar can bring a step of another run."""
    if asked.epoch or asked.run:
        return asked
    named = _TARGET.fullmatch(asked.asked)
    if named is not None and not asked.step:
        found = [step_id for step_id in held if _means(named, step_id)]
        asked = replace(asked, step=str(max(found, default="")))
    began = [
        epoch.id
        for epoch in epochs
        if str(epoch.parent) == asked.step and epoch.id.number > asked.since
    ]
    return replace(asked, epoch=str(max(began, default="")))


def restore_target(asked: RestoreFromState | None) -> StepId | None:
    """The step that the next restart must begin from; None: the newest."""
    return _parsed(asked.step) if asked is not None and not asked.epoch else None


def _means(named: re.Match[str], step_id: StepId) -> bool:
    return step_id.step == int(named[2]) if named[2] else step_id == _parsed(named[3])


def _parsed(text: str) -> StepId | None:
    with contextlib.suppress(ValueError):  # a record that was edited
        return StepId.parse(text)
    return None
