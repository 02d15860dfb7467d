"""What may be deleted from an archive. Pure.

The record is deleted first. From then on the step is not archived, whatever is left of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.core.commit_rule import Standing, trace
from keepstep.core.retention import Retention, left_behind, retired
from keepstep.steps import Epoch, StepId
from keepstep_sidecar.tiers.archive import step_record as records
from keepstep_sidecar.tiers.archive.index import ArchivedStep, Survey

ABANDONED_S = 3600.0
"""This long after the last file of a step arrived, no sidecar is still sending the others."""


def expired(
    survey: Survey,
    policy: Retention,
    *,
    epochs: Iterable[Epoch],
    now: float,
) -> tuple[ArchivedStep, ...]:
    """Steps to be deleted, oldest first. `epochs`: all that are known of the run. `policy`: with
    all pins.

    Never deleted are the newest complete step that can be restored, pinned steps, steps that cannot
    be judged, and anything in a place that two runs share. Dead steps are deleted once the life
    that left them behind has a step there.
    """
    if survey.conflict:
        return ()
    standing = _standing(survey, epochs)
    live = [one.id for one in survey.complete if standing[one.id] is Standing.LIVE]
    if not live:
        return ()
    complete = {one.id for one in survey.complete}
    dead = {id for id in complete if standing[id] is Standing.DEAD}
    abandoned = [one.id for one in survey.steps if _abandoned(one, now)]
    doomed = {
        *retired(live, policy, written_at=_written_at(survey)),
        *left_behind(live, policy, dead=dead, unfinished=abandoned),
    }
    return tuple(one for one in survey.steps if one.id in doomed)


def unkept(
    survey: Survey, policy: Retention, ids: Iterable[StepId], *, epochs: Iterable[Epoch]
) -> set[StepId]:
    """Those of `ids` (live steps that are not in the archive) that the policy would delete."""
    standing = _standing(survey, epochs)
    live = [one.id for one in survey.complete if standing[one.id] is Standing.LIVE]
    written = _written_at(survey)
    return {id for id in ids if id in retired([*live, id], policy, written_at=written)}


def _standing(survey: Survey, epochs: Iterable[Epoch]) -> dict[StepId, Standing]:
    known = {one.id: one for one in (*survey.epochs, *epochs)}
    lineage = trace(known, seen={one.id.epoch for one in survey.steps})
    return {one.id: lineage.standing(one.id) for one in survey.steps}


def _written_at(survey: Survey) -> dict[StepId, float]:
    return {one.id: one.record.written_at for one in survey.complete if one.record}


def _abandoned(step: ArchivedStep, now: float) -> bool:
    """Whether only a part was sent, long ago. A step with a faulty record is for people to
    judge."""
    return step.partial and all(now - one.modified_at > ABANDONED_S for one in step.files.values())


def names_of(step: ArchivedStep, run: str) -> tuple[str, ...]:
    """The names to delete of a step, in this order. Files that are not keepstep's stay."""
    ours = [name for name in (records.NAME, *step.shard_files) if name in step.files]
    return tuple(f"{run}/{step.id}/{name}" for name in ours)
