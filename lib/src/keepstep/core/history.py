"""What happened to a run on one machine: the events of its history. Values only.

Steps are many, so those of about a second are one event: a range and a count. All that is counted
of a run (restarts, goodput) is a fold of these events.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.steps import Epoch, StepId, Tier, Word


class Kind(Word):
    """What an event tells, and what its fields mean then; `at` and `text` are in all of them.

    STARTED: a sidecar, of version `text`. CAME: a trainer of `rank`, whose process had lived for
    `seconds`. ENDED: it is gone; `text` is "released" when it said goodbye itself. FAILED: the
    script of `rank` failed by itself at `step`. RESTORED: `rank` went on in `epoch` from its parent
    (none: at step 0), which took `seconds` and came from `tier`. RESTARTED: `rank` had its first
    step after that, and `restart` says what the interruption cost. STAGED: steps `first` to `step`
    were complete in memory of the first of the ranks, `count` of them, and blocked its training
    for `seconds`. COMMITTED: likewise, visible to readers. SKIPPED, DISCARDED: `count` saves of
    `rank` for that reason, `step` the last of them. EVICTED: steps that went as volumes were full.
    (Of skipped and discarded ones only the `number` is known.)
    INTERVAL: one of `count` steps is persisted from now on. WARNING, CLEARED: it came, it went.
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
"""`text` of an ENDED that was a goodbye."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What a restart cost a rank, in seconds that follow each other, from `at` (unix seconds), when
    its trainer ended: until there was a process again, until that began to restore, until it had
    restored, and until its first step was staged."""

    at: float
    detection_s: float = 0.0
    start_s: float = 0.0
    restore_s: float = 0.0
    first_step_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened, at `at` (unix seconds); what a `Kind` says of several that are one
    event ended at `until`. `sequence` grows with every event of a run on this machine. `number`:
    of a step whose epoch is not known."""

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
