"""What the core asks the shell to do. Doing any of them twice, late or never loses no step."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.steps import EpochId
from keepstep_operator.api.model import Job, RunKey


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """The run's status has changed; ask the registry for it when it is time to write. `soon`: more
    than its numbers did, so that a person may wait for it."""

    run: RunKey
    soon: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """Tell whoever looks at the job. `about` None: the CheckpointRun itself.

    `period_s`: an event of the same run, reason and `topic` is not said again before that.
    """

    run: RunKey
    about: Job | None
    reason: str
    message: str
    warning: bool = False
    period_s: float = 600.0
    topic: str = ""


@dataclass(frozen=True, slots=True)
class AskJob:
    """All pods are gone or over: is the job? Answer with `Registry.job_answered`."""

    run: RunKey
    job: Job


@dataclass(frozen=True, slots=True)
class FindOwner:
    """Which job made this one, if any? Answer with `Registry.owner_found`."""

    run: RunKey
    job: Job


@dataclass(frozen=True, slots=True)
class DeleteRun:
    """The run has been finished for its policy's runTTL."""

    run: RunKey


@dataclass(frozen=True, slots=True)
class NameFreshStart:
    """Write the epoch over "newest" in the annotation: it must never mean a later one."""

    run: RunKey
    epoch: EpochId


@dataclass(frozen=True, slots=True)
class NoteCommit:
    """Write into the run's annotation when its newest step was committed, in unix seconds."""

    run: RunKey
    at: float


Action = WriteStatus | EmitEvent | AskJob | FindOwner | DeleteRun | NameFreshStart | NoteCommit
