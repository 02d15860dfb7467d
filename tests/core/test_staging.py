"""How far apart steps are staged if the cost of a save decides: bounded, steady, and in step."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.staging_interval import BUDGET, StageCost, StageIntervalChooser, is_staging_due

_STEP_S = 0.1


class Training:
    """A training whose steps take `step_s`, and `added_s` more if they are staged, of which `save`
    blocks `blocked_s`. It obeys the interval as a trainer does."""

    def __init__(self, *, added_s: float, blocked_s: float, step_s: float = _STEP_S) -> None:
        self.added_s, self.blocked_s, self.step_s = added_s, blocked_s, step_s
        self.cost, self.interval = StageCost(), StageIntervalChooser()
        self.at, self.step = 0.0, 0
        self.intervals: list[int] = []
        self.random = random.Random(0)

    def run(self, steps: int, *, noise: float = 0.02) -> None:
        for _ in range(steps):
            staged = is_staging_due(self.step, self.interval.steps, trials=True)
            fraction = self.cost.added_fraction
            self.cost.note_save(self.at, due=staged, kept=True, blocked_s=self.blocked_s)
            self.at += self.step_s * self.random.uniform(1 - noise, 1 + noise)
            self.at += self.added_s if staged else 0.0
            if staged and fraction is not None:
                self.interval.record_rank_cost(0, fraction, ranks=1)
            self.intervals.append(self.interval.steps)
            self.step += 1


def test_a_save_with_negligible_cost_stages_every_step_except_in_trials() -> None:
    training = Training(added_s=0.0002, blocked_s=0.0002)
    training.run(20_000)
    assert training.intervals.count(1) > 19_500, "but for moments of noise"
    assert max(training.intervals) <= 4


@pytest.mark.parametrize("added_s", [0.003, 0.03, 0.3])
def test_the_cost_of_staging_settles_at_about_one_percent_of_the_time(
    added_s: float,
) -> None:
    training = Training(added_s=added_s, blocked_s=added_s)
    training.run(3000)
    settled = training.intervals[500:]
    fair = added_s / _STEP_S / BUDGET
    assert fair / 2 <= min(settled), "not more than twice the budget"
    assert max(settled) <= 4 * fair, "not far less often than the budget asks for"
    assert len(set(settled)) <= 2, "it does not flap"


def test_a_copy_that_slows_the_device_but_blocks_nothing_is_found_by_a_trial() -> None:
    training = Training(added_s=0.02, blocked_s=0.0)
    training.run(500)
    assert training.intervals[-1] == 1
    training.run(100)
    assert training.intervals[-1] >= 16
    assert training.step < 1024


def test_a_wait_that_training_would_have_had_anyway_is_not_counted_as_staging_cost() -> None:
    """The fence waits until the device has come to the copies; the device computes meanwhile."""
    training = Training(added_s=0.0003, blocked_s=0.05)
    training.run(100)
    assert max(training.intervals) >= 32, "as long as nothing else is known"
    training.run(3000)
    assert training.intervals[-1] == 1


def test_slower_steps_are_not_counted_as_staging_cost() -> None:
    training = Training(added_s=0.004, blocked_s=0.004)
    training.run(500)
    before = training.interval.steps
    training.step_s *= 3
    training.run(200)
    assert training.interval.steps <= before


def test_trials_leave_out_sixteen_of_1024_steps_and_only_where_every_step_is_staged() -> None:
    left_out = [step for step in range(2048) if not is_staging_due(step, 1, trials=True)]
    assert left_out == [*range(513, 544, 2), *range(1537, 1568, 2)]
    assert all(is_staging_due(step, 1) for step in range(2048))
    assert [step for step in range(600) if is_staging_due(step, 512, trials=True)] == [0, 512]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats()), min_size=1),
    st.none() | st.integers(1, 10_000),
)
def test_each_stage_interval_divides_the_persist_interval(
    reports: list[tuple[int, float]], durable_every: int | None
) -> None:
    interval = StageIntervalChooser(durable_every=durable_every)
    for rank, cost in reports:
        before = interval.steps
        assert interval.record_rank_cost(rank, cost, ranks=4) is (interval.steps != before)
        longest = 1024 if durable_every is None else durable_every
        assert longest % interval.steps == 0
        if interval.steps > before:
            assert 0 < cost < math.inf
            assert interval.steps == longest or cost <= interval.steps * BUDGET


def test_the_stage_interval_grows_at_once_and_shrinks_only_when_all_ranks_agree() -> None:
    interval = StageIntervalChooser()
    assert interval.record_rank_cost(0, 0.1, ranks=2)
    assert interval.steps == 16
    assert not interval.record_rank_cost(0, 0.001, ranks=2), "the other rank has not said so"
    assert interval.record_rank_cost(1, 0.03, ranks=2)
    assert interval.steps == 8, "as the rank with the highest cost needs it"
    interval.reset_costs()
    assert not interval.record_rank_cost(0, 0.001, ranks=2), (
        "the other rank has not said so in this life"
    )


def test_a_rank_that_has_stopped_training_does_not_prevent_a_shorter_interval() -> None:
    interval = StageIntervalChooser()
    interval.record_rank_cost(0, 0.001, ranks=2)
    interval.record_rank_cost(1, 0.1, ranks=2)
    interval.reset_costs()
    assert interval.record_rank_cost(0, 0.001, ranks=1)
    assert interval.steps == 1


@pytest.mark.parametrize("cost", [math.nan, math.inf, -math.inf, -1.0])
def test_an_invalid_cost_measurement_is_ignored(cost: float) -> None:
    interval = StageIntervalChooser()
    assert not interval.record_rank_cost(0, cost, ranks=1)
    assert interval.steps == 1
    assert interval.record_rank_cost(0, 0.1, ranks=1), "nor is it remembered"


def test_slower_steps_after_a_trial_are_not_counted_as_staging_cost() -> None:
    training = Training(added_s=0.0, blocked_s=0.0)
    training.run(1000, noise=0.0)
    training.step_s *= 3
    training.run(500, noise=0.0)
    assert training.intervals.count(1) == 1500


@pytest.mark.parametrize(("durable_every", "steps"), [(10, 5), (7, 7), (1, 1), (100_003, 100_003)])
def test_steps_that_must_become_durable_are_staged_at_any_cost(
    durable_every: int, steps: int
) -> None:
    interval = StageIntervalChooser(durable_every=durable_every)
    interval.record_rank_cost(0, 0.04, ranks=1)
    assert interval.steps == steps


def test_a_step_that_could_not_be_staged_is_not_used_as_a_cost_sample() -> None:
    cost = StageCost()
    for step in range(100):
        cost.note_save(step * _STEP_S, due=True, kept=False, blocked_s=_STEP_S)
    assert cost.added_fraction is None
