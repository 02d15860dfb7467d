"""What a run's history amounts to: restores, step times, points of charts. Pure."""

from __future__ import annotations

from itertools import count
from typing import Any

from keepstep.core.history import EventKind, HistoryEvent, RestartCost
from keepstep.steps import Epoch, EpochId, StepId
from keepstep_sidecar.ui.run_figures import (
    POINTS,
    Line,
    RunPage,
    chart_lines,
    median_step_time,
    shown_restores,
    step_times,
)

ONE, TWO = EpochId(1, "0" * 8), EpochId(2, "1" * 8)
_numbers = count(1)


def event(kind: EventKind, at: float, rank: int | None = None, **values: Any) -> HistoryEvent:
    return HistoryEvent(sequence=next(_numbers), kind=kind, at=at, until=at, rank=rank, **values)


def staged(at: float, step: int, *, epoch: EpochId = ONE, seconds: float = 0.0) -> HistoryEvent:
    return event(EventKind.STAGED, at, step=StepId(epoch, step), seconds=seconds)


def restored(at: float, rank: int, *, epoch: EpochId = TWO, parent: int | None = 7) -> HistoryEvent:
    began = None if parent is None else StepId(ONE, parent)
    return event(EventKind.RESTORED, at, rank, epoch=Epoch(epoch, began), seconds=0.1)


def restarted(at: float, rank: int, cost_s: float) -> HistoryEvent:
    return event(EventKind.RESTARTED, at, rank, restart=RestartCost(at=at, start_s=cost_s))


def test_the_timeline_shows_lost_steps_and_waiting_time_for_each_rank_of_a_restart() -> None:
    events = [
        restored(0, 0, epoch=ONE, parent=None),
        staged(1, 9),
        restored(5, 0),
        restarted(6, 0, 3.0),
        staged(6, 8, epoch=TWO),
        restored(7, 1),
        restarted(8, 1, 4.0),
    ]
    first, zero, restore = shown_restores(events)
    assert (first.began, first.lost, first.restart) == (None, None, None)
    assert [found.lost for found in (zero, restore)] == [2, 2]
    assert [found.restart and found.restart.start_s for found in (zero, restore)] == [3.0, 4.0]


def test_step_times_are_measured_within_one_epoch_and_include_the_blocked_time() -> None:
    events = [
        staged(0, 1),
        staged(1, 11, seconds=0.05),
        event(EventKind.COMMITTED, 1.5, step=StepId(ONE, 11)),
        staged(3, 21, seconds=0.1),
        event(EventKind.ENDED, 4, 0),
        event(EventKind.CONNECTED, 60, 0),
        staged(70, 22, epoch=TWO),
        staged(71, 23, epoch=TWO),
    ]
    times = step_times(events)
    assert [(time.at, time.step_s, time.blocked_s) for time in times] == [
        (1, 0.1, 0.005),
        (3, 0.2, 0.01),
        (71, 1.0, 0.0),
    ]
    assert times[0].without_s == 0.095
    now = median_step_time(times)
    assert now is not None
    assert (now.step_s, now.blocked_s) == (0.2, 0.005)
    assert median_step_time([]) is None


def test_a_long_history_is_reduced_to_few_points_that_do_not_move_when_it_grows() -> None:
    events = [staged(at, at) for at in range(4000)]

    def drawn(known: list[HistoryEvent]) -> Line:
        return chart_lines(RunPage(name="a", events=tuple(known)))["steps"]["memory"]

    now, later = drawn(events[:-1]), drawn(events)
    assert len(later[0]) <= POINTS + 1
    assert later[1][-1] == 3999
    assert set(now[1][:-1]) <= set(later[1])
