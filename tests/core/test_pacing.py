"""How often `persist: Auto` writes: replayed against failures, and from what a run shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, islice

import pytest

from keepstep.core.persist_planner import CALM_BEFORE_REFINING, PersistPlanner
from keepstep.core.schedule import (
    ENOUGH_FAILURES,
    Grid,
    Interval,
    Measured,
    Pacing,
    auto_interval,
    failures_seen,
)
from keepstep.steps import Epoch, EpochId, StepId

_DAY_S = 86400.0
_RUN = Measured(step_s=2.0, write_s=1.0, image_bytes=40 * 10**9, stall_s=0.5)


def _epoch(number: int, parent: int | None = None) -> Epoch:
    id = EpochId(number, "0" * 8)
    return Epoch(id, None if parent is None else StepId(EpochId(number - 1, "0" * 8), parent))


# --- replayed --------------------------------------------------------------------------------


def _exponential(chance: random.Random, mtbf_s: float) -> Iterator[float]:
    while True:
        yield chance.expovariate(1.0 / mtbf_s)


def _bursts(chance: random.Random, mtbf_s: float) -> Iterator[float]:
    """Gaps as production systems show them (Schroeder and Gibson 2006): Weibull of shape 0.7, whose
    mean is 1.266 times its scale; and every third failure is followed by another in minutes."""
    while True:
        yield chance.weibullvariate(1.5 * mtbf_s / 1.266, 0.7)
        if chance.random() < 1 / 3:
            yield chance.uniform(60.0, 600.0)


def _replay(gaps: list[float], choose: Callable[[list[Epoch], int], int]) -> tuple[float, int]:
    """(seconds of neither new nor kept work, images written), where each failure costs all that is
    not on the drive. `choose`: steps between two images, from the run's epochs and newest step."""
    epochs, step, writes = [_epoch(0)], 0, 0
    for number, gap_s in enumerate(gaps, 1):
        every = choose(epochs, step)
        images = int(gap_s / (every * _RUN.step_s + (_RUN.stall_s or 0.0)))
        step, writes = step + images * every, writes + images
        epochs.append(_epoch(number, step))
    return sum(gaps) - step * _RUN.step_s, writes


def _auto(measured: Measured) -> Callable[[list[Epoch], int], int]:
    """As a sidecar does: from the failures so far, the interval that holds kept where it does."""
    interval = Interval(0, "", {})

    def choose(epochs: list[Epoch], step: int) -> int:
        nonlocal interval
        failures, steps = failures_seen(epochs, step)
        known = steps and failures >= ENOUGH_FAILURES
        mtbf_s = steps * measured.step_s / failures if known else None
        interval = auto_interval(
            replace(measured, mtbf_s=mtbf_s), duty=1.0, current=interval.steps
        )
        return interval.steps

    return choose


@pytest.mark.parametrize("trace", [_exponential, _bursts])
@pytest.mark.parametrize("mtbf_s", [1800.0, 4 * 3600.0, 3 * _DAY_S])
def test_auto_wastes_little_more_than_the_best_fixed_interval(
    trace: Callable[[random.Random, float], Iterator[float]], mtbf_s: float
) -> None:
    gaps = list(islice(trace(random.Random(1974), mtbf_s), 1000))
    fixed = {k: _replay(gaps, lambda *_, k=k: 1 << k)[0] for k in range(16)}  # type: ignore[misc]
    wasted, _ = _replay(gaps, _auto(_RUN))
    print(trace.__name__, mtbf_s, wasted/min(fixed.values()), wasted/sum(gaps), fixed[0]/sum(gaps), min(fixed, key=fixed.get))
    assert wasted <= 1.08 * min(fixed.values())
    assert wasted < fixed[0] / 2, "every step that the drive takes"


@pytest.mark.parametrize("trace", [_exponential, _bursts])
def test_the_drive_is_not_written_more_often_than_it_may(
    trace: Callable[[random.Random, float], Iterator[float]],
) -> None:
    gaps = list(islice(trace(random.Random(2006), 4 * 3600.0), 1000))
    worn = replace(_RUN, drive_bytes=4 * 10**12, drive_writes_per_day=0.5)
    _, writes = _replay(gaps, _auto(worn))
    _, unlimited = _replay(gaps, _auto(_RUN))
    daily = writes * worn.image_bytes / (sum(gaps) / _DAY_S)
    print(daily/2e12, unlimited*worn.image_bytes/(sum(gaps)/_DAY_S)/2e12)
    assert 0.4 * 2 * 10**12 < daily <= 2 * 10**12
    assert unlimited > 4 * writes
