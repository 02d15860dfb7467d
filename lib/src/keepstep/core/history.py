"""What happened to a run on one machine, and its goodput. Pure.

There are many steps, so the steps of about one second are one event, with a range and a count.
Every count of a run (restarts, goodput) is a fold of these events.

Goodput is useful step time over wall time, and where the rest went. Definitions and names of the
buckets are those of Google's ml-goodput-measurement
(github.com/AI-Hypercomputer/ml-goodput-measurement). docs/goodput.md has the formula, and says
which parts of it keepstep cannot see. All time from the first process to the newest event is in
exactly one bucket. A step counts once a rank has it in memory. Steps that must be done again after
a restore move to `wasted_progress`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

from keepstep.steps import Epoch, EpochId, StepId, StrEnum, Tier


class EventKind(StrEnum):
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
    CONNECTED = "came"
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
class RestartCost:
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
class HistoryEvent:
    """One event, at `at` (unix seconds). Where several things are one event, the last of them
    happened at `until`.

    `sequence` grows with every event of a run on this machine. `number`: the number of a step whose
    epoch is not known.
    """

    sequence: int
    kind: EventKind
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
    restart: RestartCost | None = None
    text: str = ""


SEGMENTS: Final = 256
_FIRST_LIFE_S: Final = 3600.0
"""Of the first process at most this time counts as its preparation. A notebook's process may be
days old."""

_LONGEST_S: Final = 1e10
_MOST_STEPS: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Badput:
    """Seconds that were not spent on useful steps, by bucket.

    `training_prep`: from the start of a process to its restore (TRAINING_PREP with
    TPU_INITIALIZATION). `program_startup`: how much longer the first steps after a restore took
    than the next ones. `checkpoint_save`: training waited for saves. `checkpoint_restore`:
    restores. `wasted_progress`: steps that had to be done again, and steps that were unfinished
    when a life ended. `infrastructure_recovery`: from the end of a life to the start of the next
    life's process.
    """

    training_prep: float = 0.0
    program_startup: float = 0.0
    checkpoint_save: float = 0.0
    checkpoint_restore: float = 0.0
    wasted_progress: float = 0.0
    infrastructure_recovery: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.items())

    def items(self) -> list[tuple[str, float]]:
        """(bucket, seconds)"""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def plus(self, other: Badput) -> Badput:
        """The sum of both, bucket by bucket."""
        return Badput(**{name: value + getattr(other, name) for name, value in self.items()})


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The goodput of a run on this machine from `since` to `until` (unix seconds).

    `productive_s`: seconds of the `steps` steps that no restore went back over. `step`: the newest
    of them (-1: none), in the epoch `epoch`. `interruptions`: how many restores there were but the
    first.
    """

    since: float
    until: float = 0.0
    productive_s: float = 0.0
    badput: Badput = Badput()
    epoch: EpochId | None = None
    step: int = -1
    steps: int = 0
    interruptions: int = 0

    @property
    def wall_s(self) -> float:
        return self.productive_s + self.badput.total_s

    @property
    def ratio(self) -> float:
        """0 to 1."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by bucket, `productive` first."""
        return {"productive": self.productive_s, **dict(self.badput.items())}


Segment = tuple[int, int, float]
"""(newest step, number of steps, their seconds)"""


@dataclass(frozen=True, kw_only=True)
class HistoryTotals:
    """The state of the fold: the result of the events so far. Times in unix seconds.

    `mark`: all time up to here is in a bucket. `segments`: steps that count, oldest first, so that
    the cost of going back is known. `ended`: when the life that had these steps ended; None while
    it lives. `process`: when the process of the next life began. `quiet`: the trainers of the life
    that ended said goodbye. `starting`: a restore has ended, but no step has since. `first`: the
    newest segment has the first steps after that restore.
    """

    since: float | None = None
    mark: float = 0.0
    epoch: EpochId | None = None
    step: int = -1
    segments: tuple[Segment, ...] = ()
    starting: bool = False
    first: bool = False
    ended: float | None = None
    quiet: bool = False
    process: float | None = None
    badput: Badput = Badput()
    interruptions: int = 0

    @property
    def is_sane(self) -> bool:
        """Whether a fold can have produced these values. They may have been read from a file."""
        times = [self.since or 0.0, self.mark, self.ended or 0.0, self.process or 0.0]
        times += [seconds for _, seconds in self.badput.items()]
        times += [seconds for _, _, seconds in self.segments]
        ranges = [0 < count <= step + 1 < _MOST_STEPS for step, count, _ in self.segments]
        return (
            all(0.0 <= time < _LONGEST_S for time in times)
            and 0 <= self.interruptions < _MOST_STEPS
            and all(ranges)
            and -1 <= self.step < _MOST_STEPS
            and len(self.segments) <= SEGMENTS
        )

    def goodput(self, now: float) -> Goodput | None:
        """The goodput so far; None before the first restore. An interruption that has not ended is
        charged up to `now`. A step that has not ended is not counted."""
        if self.since is None or self.epoch is None:
            return None
        tally = self
        if self.ended is not None and not self.quiet:
            tally = self._paid(self.ended, "wasted_progress")._paid(now, "infrastructure_recovery")
        return Goodput(
            since=self.since,
            until=tally.mark,
            productive_s=sum(seconds for _, _, seconds in self.segments),
            badput=tally.badput,
            epoch=self.epoch,
            step=self.step,
            steps=sum(count for _, count, _ in self.segments),
            interruptions=self.interruptions,
        )

    def after(self, events: Iterable[HistoryEvent]) -> HistoryTotals:
        """The tally with these events added. They must come after the events that are counted."""
        tally = self
        for event in events:
            tally = tally._after(event)
        return tally

    def _after(self, event: HistoryEvent) -> HistoryTotals:
        match event.kind:
            case EventKind.CONNECTED:
                return self._connected(event)
            case EventKind.ENDED | EventKind.FAILED if self.epoch is not None:
                quiet = event.text == RELEASED and (self.ended is None or self.quiet)
                first = event.at if self.ended is None else self.ended
                return replace(self, ended=first, quiet=quiet)
            case EventKind.RESTORED:
                return self._restored(event)
            case EventKind.STAGED:
                return self._staged(event)
        return self

    def _connected(self, event: HistoryEvent) -> HistoryTotals:
        began = event.at - max(0.0, event.seconds)
        if self.since is None:
            began = max(began, event.at - _FIRST_LIFE_S, 0.0)
            return replace(self, since=began, mark=began, process=began)
        return replace(self, process=max(began, self.mark, self.process or 0.0))

    # --- restore -----------------------------------------------------------------------------

    def _restored(self, event: HistoryEvent) -> HistoryTotals:
        epoch = event.epoch
        if epoch is None or (self.epoch is not None and epoch.id < self.epoch):
            return self
        if epoch.id == self.epoch:  # another rank of this epoch: the ranks wait for each other
            if not self.starting:
                return self
            waited = Badput(checkpoint_restore=max(0.0, event.at - self.mark))
            mark = max(event.at, self.mark)
            return replace(self, badput=self.badput.plus(waited), mark=mark)
        parent = -1 if epoch.parent is None else epoch.parent.step
        begun = self._gap(event)
        if self.epoch is not None:
            kept, redone_s = _cut(begun.segments, parent)
            badput = begun.badput.plus(Badput(wasted_progress=redone_s))
            count = begun.interruptions + 1
            begun = replace(begun, segments=kept, badput=badput, interruptions=count)
        return replace(
            begun,
            epoch=epoch.id,
            step=parent,
            starting=True,
            first=False,
            ended=None,
            quiet=False,
            process=None,
        )

    def _gap(self, event: HistoryEvent) -> HistoryTotals:
        """Put all time since the mark, which led to this restore, into buckets."""
        since = self.since
        seconds = max(0.0, event.seconds)
        if since is None:  # the history begins in the middle
            since = max(0.0, event.at - min(seconds, _FIRST_LIFE_S))
            return replace(self, since=since, mark=since)._paid(event.at, "checkpoint_restore")
        lost = self if self.ended is None else self._paid(self.ended, "wasted_progress")
        begin = max(event.at - seconds, lost.mark)
        process = min(begin if self.process is None else self.process, begin)
        if self.epoch is not None:
            lost = lost._paid(process, "infrastructure_recovery")
        return lost._paid(begin, "training_prep")._paid(event.at, "checkpoint_restore")

    # --- steps -------------------------------------------------------------------------------

    def _staged(self, event: HistoryEvent) -> HistoryTotals:
        step_id = event.step
        if step_id is None or (self.epoch is not None and step_id.epoch < self.epoch):
            return self
        alive = replace(self, ended=None, quiet=False, process=None)
        if step_id.epoch != self.epoch:  # the epoch's restore is unknown: steps count from here on
            since = event.until if self.since is None else self.since
            mark = max(self.mark, event.until)
            return replace(alive, since=since, mark=mark, epoch=step_id.epoch, step=step_id.step)
        if step_id.step <= self.step:
            return self
        first = (
            step_id.step
            if event.first is None
            else min(max(event.first, self.step + 1), step_id.step)
        )
        others = max(0, event.count - 1) if step_id.step > first else 0
        blocked_s = max(0.0, event.seconds) / (1 + others)
        tally = alive._stepped(first, event.at if others else event.until, blocked_s)
        return tally._stepped(step_id.step, event.until, blocked_s * others)

    def _stepped(self, step: int, at: float, blocked_s: float) -> HistoryTotals:
        """The steps up to this one were done in the time from the mark to `at`."""
        if step <= self.step:
            return self
        steps, whole_s = step - self.step, max(0.0, at - self.mark)
        save_s = min(blocked_s, whole_s)
        before = self._settled((whole_s - save_s) / steps) if self.first else self
        return replace(
            before,
            mark=max(at, self.mark),
            step=step,
            segments=_fewer((*before.segments, (step, steps, whole_s - save_s))),
            starting=False,
            first=self.starting,
            badput=before.badput.plus(Badput(checkpoint_save=save_s)),
        )

    def _settled(self, usual_s: float) -> HistoryTotals:
        """Move the time by which the first steps took longer than usual to `program_startup`."""
        *others, (step, steps, seconds) = self.segments
        more = Badput(program_startup=max(0.0, seconds - steps * usual_s))
        left = (step, steps, seconds - more.program_startup)
        return replace(self, badput=self.badput.plus(more), segments=(*others, left))

    def _paid(self, until: float, bucket: str) -> HistoryTotals:
        """Put the time from the mark to `until` into this bucket."""
        more = Badput(**{bucket: max(0.0, until - self.mark)})
        return replace(self, mark=max(until, self.mark), badput=self.badput.plus(more))


def _fewer(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """If there are more than `SEGMENTS`, join the older half in pairs. The newest ones stay as they
    are, because a restore goes back over these."""
    if len(segments) <= SEGMENTS:
        return segments
    half = SEGMENTS // 2
    old = segments[:half]
    pairs = [
        (newer[0], older[1] + newer[1], older[2] + newer[2])
        for older, newer in zip(old[::2], old[1::2], strict=True)
    ]
    return (*pairs, *segments[half:])


def _cut(segments: tuple[Segment, ...], back_to: int) -> tuple[tuple[Segment, ...], float]:
    """(segments up to `back_to`, seconds of the steps beyond it).

    Rounding never makes the seconds negative, nor other than 0 if no steps lie beyond.
    """
    kept: list[Segment] = []
    redone_s = 0.0
    for step, count, seconds in segments:
        left = min(count, max(0, count - (step - back_to)))
        share_s = seconds if left == count else min(seconds, seconds * left / count)
        if left:
            kept.append((step - (count - left), left, share_s))
        redone_s += seconds - share_s
    return tuple(kept), redone_s
