"""What an earlier reconciler wrote down of a run and no report can tell again. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.steps import EpochId, StepId
from keepstep_operator.api.model import Job, job_of
from keepstep_operator.api.run import (
    JobStatus,
    RecentStatus,
    RunStatus,
    read_status,
    seconds_of,
)

FINISHED = "Finished"
"""The phase, and also the type of the entry in `recent` that says since when."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The newest commit that was ever seen. `at`: when it was seen, by our clock. `interval_s`: the
    time since the commit before; None if there was none."""

    id: StepId
    at: float
    interval_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PreviousStatus:
    """A status that was read back. `status` keeps the times when conditions last changed."""

    status: RunStatus
    restarts: int
    lost_steps: int
    epoch: EpochId | None
    step: int | None
    commit: Commit | None
    recent: list[RecentStatus]
    job: Job | None
    finished_at: float | None


def read_previous(body: Mapping[str, Any]) -> PreviousStatus:
    """Read CheckpointRun.status. An invalid status counts as an empty one."""
    status = read_status(body)
    return PreviousStatus(
        status=status,
        restarts=status.restarts,
        lost_steps=status.lost_steps,
        epoch=parse_epoch(status.epoch),
        step=status.step,
        commit=_commit(status),
        recent=status.recent,
        job=_job(status.job),
        finished_at=_finished_at(status),
    )


def parse_epoch(text: str) -> EpochId | None:
    """Parse an epoch id; None if it is not one."""
    try:
        return EpochId.parse(text)
    except ValueError:
        return None


def parse_steps(texts: Iterable[str]) -> Iterator[StepId]:
    """The step ids among the texts. The schema refuses other texts, but the object may be older
    than the schema."""
    for text in texts:
        with contextlib.suppress(ValueError):
            yield StepId.parse(text)


def _commit(status: RunStatus) -> Commit | None:
    if status.committed is None:
        return None
    at, ids = seconds_of(status.committed.time), list(parse_steps([status.committed.id]))
    return Commit(id=ids[0], at=at) if ids and at is not None else None


def _job(job: JobStatus | None) -> Job | None:
    if job is None:
        return None
    return job_of(api_version=job.api_version, kind=job.kind, name=job.name, uid=job.uid)


def _finished_at(status: RunStatus) -> float | None:
    if status.phase != FINISHED:
        return None
    return next((seconds_of(one.time) for one in status.recent if one.type == FINISHED), None)
