"""What the page knows of a run, and what it shows of the run's history: restores, lost steps, step
time, and points of charts.

Pure: events in, figures out. A chart has a few hundred points at most, however long the run is.
Points are left out by the events' numbers, so that the remaining ones stay where they are.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, TypeVar

from keepstep.core.history import EventKind, Goodput, HistoryEvent, RestartCost
from keepstep.steps import IN_POD, NEAREST_FIRST, StepId, Tier
from keepstep.wire.status import RankStatus, Status, StepStatus, TierStatus, VolumeStatus


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """`live`: what the sidecar says, None without a sidecar. In that case `steps`, which ascend,
    are those of the `volumes`. `events`: the run's history on this machine, oldest first.
    `problems`: what people should look at. `error`: why nothing of the run could be read.
    """

    name: str
    live: Status | None = None
    steps: tuple[StepStatus, ...] = ()
    committed: StepStatus | None = None
    newest: StepStatus | None = None
    events: tuple[HistoryEvent, ...] = ()
    goodput: Goodput | None = None
    volumes: tuple[str, ...] = ()
    log: str = ""
    problems: tuple[str, ...] = ()
    error: str = ""

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        return () if self.live is None else self.live.ranks

    @property
    def volume_statuses(self) -> tuple[VolumeStatus, ...]:
        return () if self.live is None else self.live.volumes

    @property
    def tiers(self) -> Mapping[Tier, TierStatus]:
        return {} if self.live is None else self.live.tiers

    @property
    def state(self) -> str:
        """The state in a word: training | waiting | stopped | unreadable."""
        if self.error:
            return "unreadable"
        if self.live is None:
            return "stopped"
        return "training" if any(rank.alive for rank in self.ranks) else "waiting"

    @property
    def state_text(self) -> str:
        """The state in a sentence. Nothing in it changes at every step: it is read out loud."""
        if self.live is None or self.error:
            return {
                "unreadable": "This run cannot be read.",
                "stopped": "No sidecar runs: this is what lies on the volumes.",
            }[self.state]
        world = max((rank.world for rank in self.ranks), default=0)
        if not world:
            return "A sidecar runs; no trainer has connected yet."
        alive = sum(rank.alive for rank in self.ranks)
        if alive:
            return f"Training: {alive} of {world} ranks are connected."
        return "A sidecar runs; no trainer is connected."


POINTS: Final = 400
"""The most points in a line of a chart."""

_BREAKS: Final = frozenset(
    {EventKind.STARTED, EventKind.CONNECTED, EventKind.ENDED, EventKind.RESTORED}
)
"""If one of these lies between two staged steps, the time between them is not a step's time."""

_RECENT: Final = 30
"""The usual step time is the median over this many events of about a second each."""

_Numbered = TypeVar("_Numbered", HistoryEvent, "StepTime")

Line = tuple[list[float], list[float | None]]
"""Unix seconds, and a value for each; None where the line is broken."""


@dataclass(frozen=True, kw_only=True)
class ShownRestore:
    """One rank that went on. `began`: the step from which (None: step 0). `lost`: how
    many steps were in memory after that one. `restart`: the cost of the interruption; None for a
    first start, or until the first step after it."""

    event: HistoryEvent
    began: StepId | None
    lost: int | None
    restart: RestartCost | None


def shown_restores(events: Sequence[HistoryEvent]) -> list[ShownRestore]:
    """All known restores, oldest first."""
    found: list[ShownRestore] = []
    staged: StepId | None = None
    for at, event in enumerate(events):
        if event.kind is EventKind.STAGED and event.step is not None:
            staged = event.step
        if event.kind is EventKind.RESTORED:
            began = event.epoch.parent if event.epoch else None
            lost = None if staged is None else staged.step - (began.step if began else -1)
            # Several ranks report the same epoch; what was staged in that epoch is not lost.
            if staged is not None and event.epoch and staged.epoch == event.epoch.id:
                lost = next(
                    (restore.lost for restore in found if restore.event.epoch == event.epoch), None
                )
            restart = _restart_of(
                event.rank, (events[index] for index in range(at + 1, len(events)))
            )
            found.append(ShownRestore(event=event, began=began, lost=lost, restart=restart))
    return found


def _restart_of(rank: int | None, after: Iterable[HistoryEvent]) -> RestartCost | None:
    for event in after:
        if event.rank == rank and event.kind is EventKind.RESTARTED:
            return event.restart
        if event.rank == rank and event.kind is EventKind.RESTORED:
            return None
    return None


def lost_step_events(events: Iterable[HistoryEvent]) -> list[HistoryEvent]:
    """Steps that were due and are not held, oldest first."""
    return [
        event
        for event in events
        if event.kind in (EventKind.SKIPPED, EventKind.DISCARDED, EventKind.EVICTED)
    ]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of one training step at `at`, and how much of it `keepstep.save` took. Seconds."""

    at: float
    sequence: int
    step_s: float
    blocked_s: float

    @property
    def without_s(self) -> float:
        return max(0.0, self.step_s - self.blocked_s)


def step_times(events: Iterable[HistoryEvent]) -> list[StepTime]:
    """Times from one staged step to the next of the same life, oldest first. Steps with an
    interruption between them are left out: that time belongs to the restart."""
    return list(_step_times(events))


def _step_times(events: Iterable[HistoryEvent]) -> Iterator[StepTime]:
    marks = (event for event in events if event.kind is EventKind.STAGED or event.kind in _BREAKS)
    for before, now in pairwise(marks):
        if before.step is None or now.step is None or before.kind in _BREAKS or now.kind in _BREAKS:
            continue
        steps = now.step.step - before.step.step
        if now.step.epoch == before.step.epoch and steps > 0 and now.until > before.until:
            yield StepTime(
                at=now.until,
                sequence=now.sequence,
                step_s=(now.until - before.until) / steps,
                blocked_s=now.seconds / steps,
            )


def median_step_time(times: Sequence[StepTime]) -> StepTime | None:
    """The median of the last step times; None if there are none."""
    if not (recent := times[-_RECENT:]):
        return None
    last = recent[-1]
    return StepTime(
        at=last.at,
        sequence=last.sequence,
        step_s=median(time.step_s for time in recent),
        blocked_s=median(time.blocked_s for time in recent),
    )


# --- charts ----------------------------------------------------------------------------------


def chart_lines(view: RunPage) -> dict[str, dict[str, Line]]:
    """Lines by chart and name. `steps`: numbers of steps, by the tier that they reached, and what
    was restored. `time`: milliseconds of a step."""
    events = view.events
    times = _thinned(step_times(events))
    at = [_s(time.at) for time in times]
    return {
        "steps": {**_reached(view), "restored": _restored(events)},
        "time": {
            "with": _broken((at, [_ms(time.step_s) for time in times]), events),
            "without": _broken((at, [_ms(time.without_s) for time in times]), events),
        },
    }


def _reached(view: RunPage) -> dict[str, Line]:
    """Steps by tier. In memory and on drives: when they were staged and committed. On peers and in
    the archive: the steps that are there now, at the time when they were staged, because it is
    unknown when they arrived there."""
    known = [event for event in view.events if event.step is not None]
    staged = [event for event in known if event.kind is EventKind.STAGED]
    committed = [event for event in known if event.kind is EventKind.COMMITTED]
    lines = {"memory": _broken(_numbers(staged), view.events), "local": _numbers(committed)}
    for tier in NEAREST_FIRST[len(IN_POD) :]:
        held = [step.id for step in view.steps if tier in step.ranks]
        found = [
            (at, step_id) for step_id in held if (at := _staged_at(step_id, staged)) is not None
        ]
        lines[tier.value] = (
            [_s(at) for at, _ in found],
            [float(step_id.step) for _, step_id in found],
        )
    return lines


def _staged_at(step_id: StepId, staged: Sequence[HistoryEvent]) -> float | None:
    """When the step was staged. `staged` ascends: a step counts when the first rank has it."""
    at = bisect.bisect_left(staged, step_id, key=_step)
    return (
        staged[at].until if at < len(staged) and _step(staged[at]).epoch == step_id.epoch else None
    )


def _step(event: HistoryEvent) -> StepId:
    assert event.step is not None
    return event.step


def _numbers(events: Sequence[HistoryEvent]) -> Line:
    shown = _thinned(events)
    return [_s(event.until) for event in shown], [float(_step(event).step) for event in shown]


def _broken(line: Line, events: Iterable[HistoryEvent]) -> Line:
    """The line with a gap wherever a trainer ended."""
    ends = [_s(event.at) for event in events if event.kind is EventKind.ENDED][-POINTS:]
    if not line[0]:
        return line
    points = sorted(
        [*zip(*line, strict=True), *((at, None) for at in ends)], key=lambda pair: pair[0]
    )
    return [at for at, _ in points], [value for _, value in points]


def _restored(events: Sequence[HistoryEvent]) -> Line:
    found = shown_restores(events)[-POINTS:]
    steps: list[float | None] = [
        float(restore.began.step) if restore.began else 0.0 for restore in found
    ]
    return [_s(restore.event.at) for restore in found], steps


def _thinned(values: Sequence[_Numbered]) -> list[_Numbered]:
    """Few enough values for a chart, including the last."""
    stride = 1
    while len(values) > POINTS * stride:
        stride *= 2
    if stride == 1:
        return list(values)
    return [time for time in values[:-1] if time.sequence % stride == 0] + [values[-1]]


def _s(unix_s: float) -> float:
    return round(unix_s, 2)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
