"""Ranks that save different steps are found, and ranks in lock step never are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.schedule import (
    LEAST,
    NEVER_SAVED_S,
    STOPPED_S,
    MissingStepsReason,
    RankStepComparison,
)
from keepstep.steps import EpochId, StepId

EPOCH = EpochId(1, "00000001")


def begun(ranks: int = 2) -> RankStepComparison:
    steps = RankStepComparison()
    for rank in range(ranks):
        steps.note_trainer_joined(rank, 0.0)
    steps.epoch_began(EPOCH, 0.0)
    return steps


def stage(steps: RankStepComparison, rank: int, *numbers: int, now: float = 1.0) -> None:
    for number in numbers:
        steps.staged(rank, StepId(EPOCH, number), now)


def reason(steps: RankStepComparison, now: float = 1.0) -> MissingStepsReason | None:
    found = steps.difference(now)
    return None if found is None else found.reason


def test_a_rank_that_never_saves_is_reported_once_the_others_are_far_ahead() -> None:
    steps = begun()
    stage(steps, 0, *range(30))
    assert reason(steps, NEVER_SAVED_S - 1) is None
    found = steps.difference(NEVER_SAVED_S)
    assert found is not None
    assert (found.saving, found.lacking, found.reason) == (0, 1, MissingStepsReason.NEVER_SAVED)
    assert str(found) == (
        "rank 1 saves none of the steps that rank 0 saves (it has saved no step yet), so no newer"
        " step is committed or can be restored: call save(step) on every rank, with the same steps"
    )


def test_ranks_that_save_odd_and_even_steps_are_reported_without_delay() -> None:
    steps = begun()
    for number in range(2 * LEAST - 1):
        stage(steps, number % 2, number)
        assert reason(steps) is None
    stage(steps, 1, 2 * LEAST - 1)
    assert reason(steps) is MissingStepsReason.PASSED


def test_a_rank_that_saves_fewer_of_the_same_steps_is_not_reported() -> None:
    steps = begun()
    for number in range(200):
        if number % 10 == 0:
            stage(steps, 1, number)  # before the other rank
            assert reason(steps) is None
        stage(steps, 0, number)
        assert reason(steps) is None


def test_a_rank_that_closed_early_is_reported_at_once() -> None:
    steps = begun()
    for number in range(5):
        stage(steps, 0, number)
        stage(steps, 1, number)
    steps.record_trainer_exit(1, closed=True)
    stage(steps, 0, *range(5, 5 + LEAST - 1))
    assert reason(steps) is None
    stage(steps, 0, 5 + LEAST)
    found = steps.difference(1.0)
    assert found is not None
    assert found.reason is MissingStepsReason.CLOSED
    assert "since step 4" in str(found)


def test_a_rank_whose_trainer_died_is_not_reported() -> None:
    steps = begun()
    steps.record_trainer_exit(1, closed=False)
    stage(steps, 0, *range(30))
    assert reason(steps, 1000.0) is None


def test_a_rank_in_a_long_evaluation_is_not_reported_for_a_minute() -> None:
    steps = begun()
    for number in range(5):
        stage(steps, 0, number)
        stage(steps, 1, number)
    stage(steps, 0, *range(5, 200), now=30.0)
    assert reason(steps, 1.0 + STOPPED_S - 1) is None
    assert reason(steps, 1.0 + STOPPED_S) is MissingStepsReason.STOPPED
    stage(steps, 1, 5, now=62.0)
    assert reason(steps, 62.0) is None


def test_ranks_of_an_earlier_epoch_are_ignored_in_the_next() -> None:
    steps = begun()
    steps.record_trainer_exit(1, closed=True)
    steps.epoch_began(EpochId(2, "00000002"), 2.0)
    for number in range(10):
        steps.staged(0, StepId(EpochId(2, "00000002"), number), 3.0)
    assert steps.difference(100.0) is None


@pytest.mark.parametrize("ranks", [2, 3, 5])
@given(data=st.data())
def test_ranks_that_save_the_same_steps_are_never_reported(ranks: int, data: st.DataObject) -> None:
    """A rank stages step s once every rank has returned from `save(s - 1)`. The reports may come
    late, but in order."""
    steps, next_step = begun(ranks), [0] * ranks
    lost = data.draw(st.sets(st.tuples(st.integers(0, ranks - 1), st.integers(0, 40))))
    for _ in range(data.draw(st.integers(10, 60))):
        rank = data.draw(st.integers(0, ranks - 1))
        if next_step[rank] >= min(next_step) + LEAST - 1:
            continue
        if (rank, next_step[rank]) in lost:
            steps.record_unstaged_steps(rank, next_step[rank], 1.0)
        else:
            stage(steps, rank, next_step[rank])
        next_step[rank] += 1
        assert steps.difference(1e6) is None
