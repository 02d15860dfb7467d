"""What the core asks the shell to do. No step is lost if an action is done twice, late or never."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.steps import EpochId
from keepstep_operator.api.model import Job, RunKey


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """The run's status has changed; ask the registry for it when it is time to write. `soon`: not
    only its numbers changed, so a person may be waiting for it."""

    run: RunKey
    soon: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """Emit a Kubernetes event about the job. `about` None: about the CheckpointRun itself.

    `period_s`: an event of the same run, reason and `topic` is not repeated within this time.
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
    """All pods are gone or over: find out whether the job is, too. Answer with
    `Registry.job_answered`."""

    run: RunKey
    job: Job


@dataclass(frozen=True, slots=True)
class FindOwner:
    """Find the job that owns this one, if any. Answer with `Registry.owner_found`."""

    run: RunKey
    job: Job


@dataclass(frozen=True, slots=True)
class DeleteRun:
    """The run has been finished for its policy's runTTL."""

    run: RunKey


@dataclass(frozen=True, slots=True)
class NameFreshStart:
    """Replace "newest" in the annotation with this epoch, so that it never means a later one."""

    run: RunKey
    epoch: EpochId


@dataclass(frozen=True, slots=True)
class NoteCommit:
    """Write the time of the newest commit, in unix seconds, into the run's annotation."""

    run: RunKey
    at: float


Action = WriteStatus | EmitEvent | AskJob | FindOwner | DeleteRun | NameFreshStart | NoteCommit
