"""How far apart steps are staged if the cost of a save decides (`--stage-every auto`).

Each trainer measures the time between two calls of `save`, with and without a step to stage
(`StageCost`). Its sidecar takes the rank that loses most, and chooses the shortest interval at
which staging takes at most `BUDGET` of the training time (`StageIntervalChooser`); the next slot
carries it to the trainers. Intervals are powers of two, or divisors of the interval at which a
person wants durable or archived steps. So ranks that learn of a change at different times still
have steps in common, and machines that choose neighbouring intervals have every second one.

While every step is staged, none is left to compare with. The time that a save blocks stands for its
cost then. It is less than the truth where a copy slows down what a device computes beside it, so 32
of each 1024 steps are a trial, in which every second one is left out. The step number alone says
which these are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

BUDGET = 0.01
"""The part of the training time that staging may take."""
_LONGEST = 1024
_TRIAL, _TRIAL_EVERY, _TRIAL_FROM = 32, 1024, 512
_ENOUGH, _SAMPLES = 12, 32
_SHORTEST_S = 1e-6
_NEAR = 1.5
"""Costs within this factor are the same. This prevents flapping."""


def is_staging_due(step: int, every: int, *, trials: bool = False) -> bool:
    """Whether this step is staged if one in `every` is, with trials or without."""
    if trials and every == 1 and 0 <= step % _TRIAL_EVERY - _TRIAL_FROM < _TRIAL:
        every = 2
    return step % every == 0


class StageCost:
    """Measures by how much longer a step takes because it is staged: each staged one is compared
    with those before it that were not, because a step's own time changes while a run goes on."""

    def __init__(self) -> None:
        self._near = deque[float](maxlen=_SAMPLES // 2)
        """Seconds of the newest steps that were not staged; none once two in a row are staged."""
        self._added, self._blocked = deque[float](maxlen=_SAMPLES), deque[float](maxlen=_SAMPLES)
        self._before: tuple[float, bool] | None = None

    def note_save(self, at: float, *, due: bool, kept: bool, blocked_s: float) -> None:
        """`save` was called at `at` (seconds), for a step that is to be staged or left out. `kept`,
        `blocked_s`: whether the save before this one staged its step, and how long it blocked,
        fence included."""
        before, self._before = self._before, (at, due)
        if before is None:
            return
        seconds = at - before[0]
        if not before[1]:
            self._near.append(seconds)
            return
        if not kept:
            return
        self._blocked.append(blocked_s / max(seconds - blocked_s, _SHORTEST_S))
        if len(self._near) >= _ENOUGH // 3:
            self._added.append(seconds / max(_median(self._near), _SHORTEST_S) - 1.0)
        if due:
            self._near.clear()

    @property
    def added_fraction(self) -> float | None:
        """What staging adds to a step, as a part of a step that is not staged; None: too few
        samples."""
        for samples in (self._added, self._blocked):
            if len(samples) >= _ENOUGH:
                return max(0.0, _median(samples))
        return None


class StageIntervalChooser:
    """Chooses the interval for the ranks of one machine. `steps`: the one that holds now."""

    def __init__(self, *, durable_every: int | None = None) -> None:
        """`durable_every`: steps that a person wants to be durable or archived are multiples of
        it."""
        if durable_every is None:
            self._choices: list[int] = [1 << k for k in range(_LONGEST.bit_length())]
        else:
            shorter = range(1, min(durable_every, _LONGEST + 1))
            self._choices = [every for every in shorter if durable_every % every == 0]
            self._choices.append(durable_every)
        self.steps = 1
        self._costs: dict[int, float] = {}

    @property
    def can_stage_every_second_step(self) -> bool:
        """Whether trials leave out no step that a person wants."""
        return 2 in self._choices

    def reset_costs(self) -> None:
        """A trainer begins: what earlier ones measured is no longer asked."""
        self._costs.clear()

    def record_rank_cost(self, rank: int, cost: float, *, ranks: int) -> bool:
        """A rank reports its `StageCost.added_fraction`. `ranks`: how many train here. Returns
        whether the interval changed. It becomes longer at once, and shorter when all ranks
        agree."""
        if not 0 <= cost < math.inf:
            return False
        self._costs[rank] = cost
        worst, before = max(self._costs.values()), self.steps
        if self._shortest(worst / _NEAR) > before:
            self.steps = self._shortest(worst)
        elif len(self._costs) >= ranks:
            self.steps = min(before, self._shortest(worst * _NEAR))
        return self.steps != before

    def _shortest(self, cost: float) -> int:
        return next((n for n in self._choices if cost <= n * BUDGET), self._choices[-1])


def _median(samples: Iterable[float]) -> float:
    # `statistics` would take a tenth of the time of `import keepstep`
    ordered = sorted(samples)
    return ordered[len(ordered) // 2]
