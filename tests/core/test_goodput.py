"""Goodput, which is a fold of events, compared with a simulation that knows where each second
went."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.history import SEGMENTS, EventKind, Goodput, HistoryEvent, HistoryTotals
from keepstep.steps import Epoch, EpochId, StepId

# --- a simulated run -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Life:
    """A life; times are seconds. `back`: how many steps before the newest step it went on. `torn`:
    the time of the step that it did not finish. `bundle`: the number of steps in an event."""

    away: float = 4.0
    prep: float = 3.0
    restore: float = 2.0
    lag: float = 0.5
    startup: float = 5.0
    step: float = 1.0
    blocked: float = 0.1
    steps: int = 10
    torn: float = 0.3
    back: int = 2
    bundle: int = 1
    known_end: bool = True


@dataclass
class Truth:
    """Where each second went, from what happened and not from events."""

    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(Goodput(since=0).seconds, 0.0)
    )
    steps: dict[int, float] = field(default_factory=dict)

    def add(self, bucket: str, seconds: float) -> None:
        self.parts[bucket] += seconds


def simulate(lives: list[Life], began: float = 1e6) -> tuple[list[HistoryEvent], Truth]:
    """The events of a run of two ranks, and the truth."""
    events: list[HistoryEvent] = []
    truth = Truth()
    now, newest = began, -1
    parent: StepId | None = None

    def record(kind: EventKind, until: float | None = None, **fields: object) -> None:
        at = now if until is None else until
        events.append(
            HistoryEvent(sequence=len(events) + 1, kind=kind, until=now, at=min(at, now), **fields)
        )  # type: ignore[arg-type]

    for number, life in enumerate(lives, 1):
        epoch = EpochId(number, f"{number:08x}")
        if number > 1:
            now += life.away
            truth.add("infrastructure_recovery", life.away)
            back_to = max(-1, newest - life.back)
            redone = {step: s for step, s in truth.steps.items() if step > back_to}
            for step, seconds in redone.items():
                truth.add("wasted_progress", seconds)
                del truth.steps[step]
            parent = (
                None if back_to < 0 else StepId(EpochId(number - 1, f"{number - 1:08x}"), back_to)
            )
            newest = back_to
        born = now
        now += life.prep / 2
        for rank in range(2):
            record(EventKind.CONNECTED, rank=rank, attempt=f"{number}-{rank}", seconds=now - born)
        now += life.prep / 2 + life.restore
        truth.add("training_prep", life.prep)
        record(EventKind.RESTORED, rank=0, epoch=Epoch(epoch, parent), seconds=life.restore)
        now += life.lag
        record(EventKind.RESTORED, rank=1, epoch=Epoch(epoch, parent), seconds=life.restore)
        truth.add("checkpoint_restore", life.restore + life.lag)
        bundle: list[tuple[int, float]] = []
        for count in range(life.steps):
            startup = life.startup if count == 0 else 0.0
            now += life.step + life.blocked + startup
            newest += 1
            truth.add("checkpoint_save", life.blocked)
            truth.steps[newest] = life.step
            if life.steps > 1:
                truth.add("program_startup", startup)
            else:  # with one step, nothing shows how long a step takes without its startup
                truth.steps[newest] += startup
            bundle.append((newest, now))
            if len(bundle) == life.bundle or count == life.steps - 1:
                record(
                    EventKind.STAGED, until=bundle[0][1],
                    first=bundle[0][0], step=StepId(epoch, newest),
                    count=len(bundle), seconds=life.blocked * len(bundle),
                )  # fmt: skip
                bundle.clear()
        now += life.torn
        truth.add("wasted_progress" if life.known_end else "infrastructure_recovery", life.torn)
        if life.known_end:
            record(EventKind.ENDED, rank=1, text="gone")
            record(EventKind.ENDED, rank=0, text="gone")
    if not lives[-1].known_end:  # no event shows the torn step yet
        truth.add("infrastructure_recovery", -lives[-1].torn)
    truth.parts["productive"] = sum(truth.steps.values())
    return events, truth


seconds = st.floats(0.0, 1e4)
some_lives = st.lists(
    st.builds(
        Life, away=seconds, prep=seconds, restore=seconds, lag=seconds, startup=seconds,
        step=st.floats(1e-3, 1e3), blocked=seconds, steps=st.integers(1, 12), torn=seconds,
        back=st.integers(0, 20), bundle=st.integers(1, 12), known_end=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@settings(max_examples=300)
@given(lives=some_lives)
def test_the_totals_assign_every_second_of_a_run_to_its_true_cause(lives: list[Life]) -> None:
    """The end of a life may have no event, as when its sidecar died with it."""
    events, truth = simulate(lives)
    found = HistoryTotals().after(events).goodput(events[-1].until)
    assert found is not None
    first_life = min(lives[0].prep / 2, 3600.0) - lives[0].prep / 2  # at most an hour of it counts
    truth.parts["training_prep"] += first_life
    assert found.seconds == pytest.approx(truth.parts, abs=1e-3)
    wall_s = events[-1].until - 1e6 - first_life * -1
    assert found.wall_s == pytest.approx(wall_s, abs=1e-3)
    assert found.ratio == pytest.approx(
        truth.parts["productive"] / wall_s if wall_s else 0.0, abs=1e-6
    )
    assert (found.steps, found.interruptions) == (len(truth.steps), len(lives) - 1)


@settings(max_examples=100)
@given(lives=some_lives, cuts=st.lists(st.integers(0, 200), max_size=3))
def test_totals_that_are_computed_in_batches_equal_totals_of_all_events(
    lives: list[Life], cuts: list[int]
) -> None:
    """A sidecar forgets old events, and may restart between two events."""
    events, _ = simulate(lives)
    tally = HistoryTotals()
    for begin, end in pairwise([0, *sorted(cuts), None]):
        tally = tally.after(events[begin:end])
        assert tally.is_sane
    assert tally == HistoryTotals().after(events)


# --- what the simulation does not have -------------------------------------------------------


def happened(kind: EventKind, at: float, **fields: object) -> HistoryEvent:
    return HistoryEvent(sequence=1, kind=kind, at=at, until=at, **{"rank": 0, **fields})  # type: ignore[arg-type]


def test_a_long_run_takes_no_more_memory_and_no_second_is_lost() -> None:
    events, truth = simulate([Life(steps=1000, back=100), Life(steps=2000), Life(steps=3)] * 7)
    tally = HistoryTotals().after(events)
    found = tally.goodput(events[-1].until)
    assert found is not None
    assert len(tally.segments) <= SEGMENTS
    assert found.wall_s == pytest.approx(events[-1].until - 1e6)
    assert found.seconds == pytest.approx(truth.parts, rel=1e-6)


odd = st.one_of(st.floats(-1e300, 1e300), st.floats(0.0, 1e6))
ids = st.builds(
    StepId, st.builds(EpochId, st.integers(0, 5), st.just("0" * 8)), st.integers(0, 10**18 - 1)
)
any_events = st.builds(
    HistoryEvent,
    sequence=st.just(1), kind=st.sampled_from(EventKind), at=st.floats(0.0, 2e9),
    until=st.floats(0.0, 2e9), step=st.none() | ids,
    first=st.none() | st.integers(-(2**62), 2**62), count=st.integers(-9, 2**62),
    seconds=odd,
    epoch=st.none() | st.builds(Epoch, ids.map(lambda step_id: step_id.epoch), st.none() | ids),
)  # fmt: skip


@settings(max_examples=500)
@given(events=st.lists(any_events, max_size=40))
def test_goodput_is_finite_and_between_0_and_1_for_any_events(events: list[HistoryEvent]) -> None:
    """Events come from a file that any program may have written, and their times from clocks that
    are set."""
    tally = HistoryTotals().after(events)
    assert tally.is_sane
    found = tally.goodput(2e9)
    if found is not None:
        assert 0.0 <= found.ratio <= 1.0
        assert math.isfinite(found.wall_s)
        assert all(seconds >= 0.0 for seconds in found.seconds.values())
