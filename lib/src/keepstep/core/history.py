"""What happened to a run on one machine: the events of its history. Values only.

There are many steps, so the steps of about one second are one event, with a range and a count.
Every count of a run (restarts, goodput) is a fold of these events.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.steps import Epoch, StepId, StrEnum, Tier


class Kind(StrEnum):
    """What an event tells, and what its fields mean. All events have `at` and `text`.

    STARTED: a sidecar of version `text` started.
    CAME: a trainer of `rank` connected, whose process had lived for `seconds`.
    ENDED: the trainer is gone; `text` is "released" if it said goodbye itself.
    FAILED: the script of `rank` failed by itself at `step`.
    RESTORED: `rank` went on in `epoch` from the epoch's parent (none: at step 0). This took
        `seconds`; the image came from `tier`.
    RESTARTED: `rank` had its first step after that; `restart` says what the interruption cost.
    STAGED: `count` steps, `first` to `step`, were complete in the memory of the first of the ranks,
        and blocked its training for `seconds`.
    COMMITTED: as STAGED, of steps that became visible to readers.
    SKIPPED, DISCARDED: `count` saves of `rank` were skipped or discarded, for the reason in `text`;
        of the last one only the `number` of its step is known.
    EVICTED: steps that were deleted because volumes were full.
    INTERVAL: from now on, one of `count` steps is persisted.
    WARNING, CLEARED: a warning arose; it ended.
    """

    STARTED = "started"
    CAME = "came"
    ENDED = "ended"
    FAILED = "failed"
    RESTORED = "restored"
    RESTARTED = "restarted"
    STAGED = "staged"
    COMMITTED = "committed"
    SKIPPED = "skipped"
    DISCARDED = "discarded"
    EVICTED = "evicted"
    INTERVAL = "interval"
    WARNING = "warning"
    CLEARED = "cleared"


RELEASED = "released"
"""The `text` of an ENDED event of a trainer that said goodbye."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What a restart cost a rank, as four spans of seconds, one after the other.

    They begin at `at` (unix seconds), when the rank's trainer ended. `detection_s`: until there was
    a process again. `start_s`: until this process began to restore. `restore_s`: until it had
    restored. `first_step_s`: until its first step was staged.
    """

    at: float
    detection_s: float = 0.0
    start_s: float = 0.0
    restore_s: float = 0.0
    first_step_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.detection_s + self.start_s + self.restore_s + self.first_step_s


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event, at `at` (unix seconds). Where several things are one event, the last of them
    happened at `until`.

    `sequence` grows with every event of a run on this machine. `number`: the number of a step whose
    epoch is not known.
    """

    sequence: int
    kind: Kind
    at: float
    until: float
    rank: int | None = None
    attempt: str = ""
    step: StepId | None = None
    number: int | None = None
    first: int | None = None
    count: int = 1
    seconds: float = 0.0
    epoch: Epoch | None = None
    tier: Tier | None = None
    restart: Restart | None = None
    text: str = ""
