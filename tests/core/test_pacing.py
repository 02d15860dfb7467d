"""How often `persist: Auto` writes: replayed against failures, and chosen from what a run
measures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from keepstep.core.node import Node, RanksServed
from keepstep.core.schedule import (
    CALM_BEFORE_REFINING,
    ENOUGH_FAILURES,
    NodeMeasurements,
    PersistCostMeasurements,
    PersistInterval,
    PersistPlanner,
    StepGrid,
    Write,
    choose_persist_interval,
    count_failures_and_steps,
)
from keepstep.steps import Epoch, EpochId, StepId

_DAY_S = 86400.0
_RUN = NodeMeasurements(step_s=2.0, write_s=1.0, image_bytes=40 * 10**9, stall_s=0.5)


def _epoch(number: int, parent: int | None = None) -> Epoch:
    epoch_id = EpochId(number, "0" * 8)
    return Epoch(epoch_id, None if parent is None else StepId(EpochId(number - 1, "0" * 8), parent))


# --- replayed --------------------------------------------------------------------------------


def _exponential(chance: random.Random, mtbf_s: float) -> Iterator[float]:
    while True:
        yield chance.expovariate(1.0 / mtbf_s)


def _bursts(chance: random.Random, mtbf_s: float) -> Iterator[float]:
    """Gaps between failures like those of production systems (Schroeder and Gibson 2006). They are
    Weibull distributed with shape 0.7, whose mean is 1.266 times its scale. On average every third
    failure is followed by another within minutes."""
    while True:
        yield chance.weibullvariate(1.5 * mtbf_s / 1.266, 0.7)
        if chance.random() < 1 / 3:
            yield chance.uniform(60.0, 600.0)


def _replay(gaps: list[float], choose: Callable[[list[Epoch], int], int]) -> tuple[float, int]:
    """(seconds that did not become kept work, images written). A failure costs all work that is not
    on the drive. `choose` returns the number of steps between two images, from the run's epochs and
    newest step."""
    epochs, step, writes = [_epoch(0)], 0, 0
    for number, gap_s in enumerate(gaps, 1):
        every = choose(epochs, step)
        images = int(gap_s / (every * _RUN.step_s + (_RUN.stall_s or 0.0)))
        step, writes = step + images * every, writes + images
        epochs.append(_epoch(number, step))
    return sum(gaps) - step * _RUN.step_s, writes


def _auto(measured: NodeMeasurements) -> Callable[[list[Epoch], int], int]:
    """Choose like a sidecar: from the failures so far, and keep the current interval if it still
    holds."""
    interval = PersistInterval(0, "", {})

    def choose(epochs: list[Epoch], step: int) -> int:
        nonlocal interval
        failures, steps = count_failures_and_steps(epochs, step)
        known = steps and failures >= ENOUGH_FAILURES
        mtbf_s = steps * measured.step_s / failures if known else None
        interval = choose_persist_interval(replace(measured, mtbf_s=mtbf_s), current=interval.steps)
        return interval.steps

    return choose


@pytest.mark.parametrize("trace", [_exponential, _bursts])
@pytest.mark.parametrize("mtbf_s", [1800.0, 4 * 3600.0, 3 * _DAY_S])
def test_the_automatic_persist_interval_wastes_little_more_time_than_the_best_fixed_one(
    trace: Callable[[random.Random, float], Iterator[float]], mtbf_s: float
) -> None:
    gaps = list(islice(trace(random.Random(1974), mtbf_s), 1000))
    fixed = {k: _replay(gaps, lambda *_, k=k: 1 << k)[0] for k in range(16)}  # type: ignore[misc]
    wasted, _ = _replay(gaps, _auto(_RUN))
    assert wasted <= 1.05 * min(fixed.values())
    assert wasted < fixed[0] / 2, "every step that the drive takes"


@pytest.mark.parametrize("trace", [_exponential, _bursts])
def test_the_drive_wear_limit_bounds_the_write_rate(
    trace: Callable[[random.Random, float], Iterator[float]],
) -> None:
    gaps = list(islice(trace(random.Random(2006), 4 * 3600.0), 1000))
    worn = replace(_RUN, drive_bytes=4 * 10**12, drive_writes_per_day=0.5)
    _, writes = _replay(gaps, _auto(worn))
    _, unlimited = _replay(gaps, _auto(_RUN))
    daily = writes * worn.image_bytes / (sum(gaps) / _DAY_S)
    assert 0.4 * 2 * 10**12 < daily <= 2 * 10**12
    assert unlimited > 4 * writes


def test_a_fluctuating_limit_does_not_make_the_interval_oscillate() -> None:
    chance, seen, interval = random.Random(1), [], PersistInterval(0, "", {})
    for _ in range(1000):
        measured = replace(_RUN, stall_s=0.16 * chance.uniform(0.9, 1.1))
        interval = choose_persist_interval(measured, current=interval.steps)
        seen.append(interval.steps)
    assert set(seen[20:]) == {16}
    assert choose_persist_interval(replace(measured, stall_s=0.12), current=16).steps == 8
    kept_up = replace(measured, stall_s=None, write_s=1.9)
    assert choose_persist_interval(kept_up, current=16).steps == 1, "each that the drive takes"


# --- failures --------------------------------------------------------------------------------


def test_the_failure_rate_starts_at_the_first_failure_and_counts_repeated_steps_once() -> None:
    assert count_failures_and_steps([_epoch(0)], 500) == (0, 0)
    kept_from_the_middle = [_epoch(1, 90_000), _epoch(2, 90_100), _epoch(3, 90_060)]
    assert count_failures_and_steps(kept_from_the_middle, 90_160) == (2, 200)


# --- measured --------------------------------------------------------------------------------


def _train(
    pacing: PersistCostMeasurements,
    steps: range,
    *,
    epochs: tuple[Epoch, ...] = (_epoch(0),),
    persist: int = 1,
    stall_s: float = 0.0,
    jitter_s: float = 0.0,
) -> PersistInterval | None:
    """Train with steps of one second; a step after a persisted one is longer by `stall_s`. Two
    ranks on two drives write 3 GB each, in a quarter and in half a second. Returns the last
    interval."""
    chance, now, interval = random.Random(7), 100.0 * steps.start, None
    for step in steps:
        wrote = (step - 1) % persist == 0
        now += 1.0 + (stall_s if wrote else 0.0) + chance.uniform(-jitter_s, jitter_s)
        step_id = StepId(epochs[-1].id, step)
        pacing.sealed(step_id, now)
        pacing.sealed(step_id, now + 0.2)
        if step % persist == 0:
            for drive, seconds in ((0, 0.25), (1, 0.5)):
                pacing.on_write_began()
                pacing.wrote(step_id, drive=drive, seconds=seconds, size_bytes=3 * 10**9)
                pacing.on_write_ended()
            interval = pacing.record_durable_step(step_id, epochs) or interval
    return interval


def test_the_default_persists_every_step_that_the_drive_can_take() -> None:
    pacing = PersistCostMeasurements()
    assert _train(pacing, range(8)) is None, "too early to say"
    interval = _train(pacing, range(8, 50))
    assert interval is not None
    assert (interval.steps, interval.limit) == (1, "step")
    assert pacing.measured == NodeMeasurements(
        step_s=pytest.approx(1.0), write_s=0.5, image_bytes=6 * 10**9
    )


def test_the_measured_stall_is_the_extra_time_of_steps_with_a_write_beyond_noise() -> None:
    noisy = PersistCostMeasurements()
    _train(noisy, range(200), persist=4, stall_s=0.001, jitter_s=0.1)
    assert noisy.measured is not None
    assert noisy.measured.stall_s == 0.0
    stalled = PersistCostMeasurements()
    interval = _train(stalled, range(200), persist=4, stall_s=0.1, jitter_s=0.02)
    assert stalled.measured is not None
    assert stalled.measured.stall_s == pytest.approx(0.1, rel=0.2)
    assert interval is not None
    assert (interval.steps, interval.limit) == (16, "stall"), "a hundredth of the time at most"


def test_write_cost_is_measured_by_a_trial_when_every_step_is_written() -> None:
    pacing, now, every, persisted = PersistCostMeasurements(), 0.0, 1, []
    for step in range(1600):
        wrote = bool(persisted) and persisted[-1] == step - 1
        now += 1.0 + (0.1 if wrote else 0.0)
        step_id = StepId(_epoch(0).id, step)
        pacing.sealed(step_id, now)
        if step % every == 0:
            persisted.append(step)
            pacing.on_write_began()
            pacing.wrote(step_id, drive=0, seconds=0.5, size_bytes=10**9)
            pacing.on_write_ended()
            if (interval := pacing.record_durable_step(step_id, ())) is not None:
                every = interval.steps
        if step == 1023:
            assert persisted == list(range(1024))
    assert pacing.measured is not None
    assert pacing.measured.stall_s == pytest.approx(0.1)
    assert (every, interval and interval.limit) == (16, "stall")


def test_every_step_is_written_again_after_a_trial_that_found_no_cost() -> None:
    pacing = PersistCostMeasurements()
    trial = _train(pacing, range(900, 1030)) and _train(pacing, range(1030, 1050), persist=2)
    assert trial is not None
    assert (trial.steps, trial.limit) == (2, "trial")
    after = _train(pacing, range(1060, 1300))
    assert after is not None
    assert (after.steps, after.limit) == (1, "step")
    assert pacing.measured is not None
    assert pacing.measured.stall_s == 0.0, "what was seen is remembered"


def test_a_known_failure_rate_balances_lost_work_against_stalls() -> None:
    epochs = tuple(_epoch(number, 1000 * number) for number in range(1, 6))
    pacing = PersistCostMeasurements()
    interval = _train(pacing, range(5000, 5200), epochs=epochs, persist=4, stall_s=0.1)
    assert pacing.measured is not None
    assert (pacing.measured.failures, interval and interval.limit) == (4, "failures")
    assert pacing.measured.mtbf_s == pytest.approx(4196 / 4, rel=0.1)
    assert interval is not None
    assert interval.steps == 16, "Young: sqrt(2 x 0.1 s x 1050 s) = 14.5 s"


def test_peer_copies_count_towards_the_drive_wear_limit() -> None:
    pacing = PersistCostMeasurements(drive_writes_per_day=1.0, copies=1)
    pacing.drive_bytes = 86_400 * 10**9
    interval = _train(pacing, range(20))
    assert interval is not None
    assert (interval.steps, interval.limit) == (16, "wear"), "12 GB a step, 1 GB a second"


# --- planned ---------------------------------------------------------------------------------


def _persisted(planner: PersistPlanner, steps: range) -> list[int]:
    """The steps that the planner persists if every write ends before the next step is sealed."""
    found = []
    for step in steps:
        step_id = StepId(EpochId(0, "0" * 8), step)
        for write in planner.sealed(0, step_id):
            planner.on_write_end(0, write.id)
            found.append(write.id.step)
    return found


@pytest.mark.parametrize("slots", [2, 4])
def test_the_persist_interval_reaches_the_pace_by_doubling_and_does_not_exceed_it(
    slots: int,
) -> None:
    planner = PersistPlanner([0], StepGrid(), slots=slots)
    planner.set_least_interval(8)
    assert _persisted(planner, range(1, 40)) == [1, 2, 3, 4, 8, 16, 24, 32]
    assert set(_persisted(planner, range(40, 320))) == set(range(40, 320, 8))
    planner.set_least_interval(2)
    _persisted(planner, range(320, 320 + 16 * 8 * CALM_BEFORE_REFINING))
    assert set(_persisted(planner, range(1000, 1100))) == set(range(1000, 1100, 2))


def test_nodes_that_measure_differently_still_commit_together() -> None:
    nodes = PersistPlanner([0], StepGrid(3)), PersistPlanner([0], StepGrid(3))
    written: list[set[int]] = [set(), set()]
    for steps, paces in (
        (range(200), (6, 24)),
        (range(200, 900), (48, 3)),
        (range(900, 1900), (3, 12)),
    ):
        for node, found, pace in zip(nodes, written, paces, strict=True):
            node.set_least_interval(pace)
            found.update(_persisted(node, steps))
    committed = sorted(written[0] & written[1])
    assert max(later - earlier for earlier, later in pairwise(committed)) <= 48, (
        "the coarser of both"
    )
    assert committed[-1] >= 1900 - 48


def test_a_node_keeps_its_pace_when_its_ranks_change() -> None:
    node = Node({}, grid=StepGrid())
    node.step(RanksServed(frozenset({0}), 4))
    node.planner.set_least_interval(8)
    node.step(RanksServed(frozenset({0, 1}), 4))
    assert node.planner.least == 8


def test_the_interval_exceeds_the_pace_when_the_drive_cannot_keep_up() -> None:
    planner = PersistPlanner([0], StepGrid())
    planner.set_least_interval(2)
    for step in range(400):
        step_id = StepId(EpochId(0, "0" * 8), step)
        planner.sealed(0, step_id)
        if planner.step_in_flight is not None and step >= planner.step_in_flight.step + 10:
            planner.on_write_end(0, planner.step_in_flight)
    assert planner.counts.skipped > 0
    assert planner.grid.newest_interval == 16


def test_an_old_step_that_is_staged_again_is_written_at_most_once() -> None:
    """It is fetched for a restart. More newer steps were written since than are remembered."""
    planner, epoch = PersistPlanner([0], StepGrid(1)), EpochId(1, "0" * 8)
    for step in range(200):
        planner.sealed(0, StepId(epoch, step))
        planner.on_write_end(0, StepId(epoch, step))
        planner.on_overwritten(0, StepId(epoch, step))
    for write in planner.sealed(0, StepId(epoch, 40)):
        assert planner.on_write_end(0, write.id) == ()
    assert planner.has_no_pending_writes
    newer = StepId(epoch, 200)
    assert planner.sealed(0, newer) == (Write(0, newer),)
