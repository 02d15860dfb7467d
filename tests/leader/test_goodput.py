"""Goodput of a run over its lives: what sidecars tell, added up."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.history import Badput, EventKind, HistoryEvent, HistoryTotals
from keepstep.leader.goodput import (
    BUCKETS,
    MOST_TALLIES,
    GoodputSum,
    GoodputTotal,
    add_tally,
    in_whole_seconds,
)
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.member_reports import ReportedGoodput
from keepstep.wire.run_reports import RunGoodput
from tests.leader.plays import T0

LIFE_1, LIFE_2 = EpochId(1, "00000001"), EpochId(2, "00000002")


def volume(number: int) -> str:
    """The id of the history that begins on this volume."""
    return f"{number:016x}"


def resumed(sum_: GoodputTotal | None) -> GoodputTotal | None:
    """As another leader reads it back from the record."""
    goodput = GoodputSum()
    goodput._sum = sum_
    body = msgspec.json.encode(goodput.get_throttled_total(at=T0))
    goodput.resume(msgspec.json.decode(body, type=RunGoodput | None))
    return goodput._sum


def is_whole(sum_: GoodputTotal) -> bool:
    return sum_.total.is_sane and len(sum_.known) <= MOST_TALLIES


def counted(since: float, *seconds: float, **of: Any) -> ReportedGoodput:
    """Any count, with time in no bucket."""
    productive_s, prep_s, wasted_s, _ = seconds
    badput = Badput(training_prep=prep_s, wasted_progress=wasted_s)
    until = since + sum(seconds)
    of["steps"] = min(of["steps"], of["step"] + 1)
    return ReportedGoodput(since=since, until=until, productive_s=productive_s, badput=badput, **of)


any_count = st.builds(
    counted,
    *[st.floats(0.0, 1e9)] * 5,
    id=st.integers(0, 12).map(volume),
    epoch=st.sampled_from([LIFE_1, LIFE_2]),
    step=st.integers(-1, 10**14),
    steps=st.integers(0, 10**14),
)


@settings(max_examples=200, deadline=None)
@given(reports=st.lists(any_count, max_size=20))
def test_the_totals_assign_every_second_to_exactly_one_category(
    reports: list[ReportedGoodput],
) -> None:
    sum_: GoodputTotal | None = None
    for goodput in reports:
        sum_ = add_tally(sum_, in_whole_seconds(goodput))
        assert is_whole(sum_)
        assert resumed(sum_) == sum_


# --- one by one ----------------------------------------------------------------------------------


def a_life(
    *steps: int, epoch: EpochId = LIFE_1, parent: int | None = None, at: float = T0
) -> list[HistoryEvent]:
    """A process begins at `at`, has restored ten seconds later, and then a step each ten."""
    before = None if parent is None else StepId(EpochId(epoch.number - 1, "0" * 8), parent)
    times = itertools.count(at + 20, 10)
    happened = [
        HistoryEvent(sequence=1, kind=EventKind.CONNECTED, at=at, until=at, rank=0),
        HistoryEvent(
            sequence=2, kind=EventKind.RESTORED, at=at + 10, until=at + 10, rank=0, seconds=4.0,
            epoch=Epoch(epoch, before),
        ),
    ]  # fmt: skip
    for step, when in zip(steps, times, strict=False):
        happened.append(
            HistoryEvent(
                sequence=3, kind=EventKind.STAGED, at=when, until=when, step=StepId(epoch, step)
            )
        )
    return happened


def tally(*events: HistoryEvent, number: int = 0) -> ReportedGoodput:
    """As a sidecar tells it at the newest event."""
    found = HistoryTotals().after(events).goodput(events[-1].until)
    assert found is not None
    return ReportedGoodput.from_goodput(found, volume(number))


FIRST = a_life(0, 1, 2, 3, 4)
"""Until T0 + 60: 6 s of preparation, a restore of 4, five steps of 10."""


def test_tallies_of_two_volumes_are_added_and_repeated_steps_are_counted_once() -> None:
    """The second life goes on from step 2, 40 s after the first one ended at step 4."""
    again = a_life(3, 4, 5, epoch=LIFE_2, parent=2, at=T0 + 100)
    sum_ = add_tally(
        add_tally(None, in_whole_seconds(tally(*FIRST))), in_whole_seconds(tally(*again, number=1))
    )
    assert dict(zip(BUCKETS, sum_.total.seconds, strict=True)) == {
        **dict.fromkeys(BUCKETS, 0),
        "productive": 60,
        "training_prep": 12,
        "checkpoint_restore": 8,
        "infrastructure_recovery": 40,
        "wasted_progress": 20,
    }
    assert sum_.total.steps == 6
    assert resumed(sum_) == sum_
