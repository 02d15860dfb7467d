"""Which steps are due: a pure function of the step, so that all ranks pick the same ones.

A `Grid` contains every multiple of base x 2^k. The grid of a smaller k contains all points of the
grid of a larger k. So ranks that learn of a change of k at different times still have due steps in
common. A change carries the step from which it holds, which lies ahead of every rank.

This module also says how long the interval should be (`auto_interval`), from what was measured of
the run (`Pacing`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from keepstep.steps import Epoch, StepId

MAX_EXPONENT = 20
_CHANGES_KEPT = 8

ENOUGH_FAILURES = 3
"""So many failures are needed before their rate is used. The standard error of the rate is then
58 %. The interval depends on the root of the rate, so its error is about 29 %: less than a
doubling."""

_ENOUGH = 8
"""Samples that are needed before a median of them is used."""
_SAMPLES = 128
_WRITES = 16
_DEVIATION = 1.4826 * 1.2533
"""Factor from the median absolute deviation to the standard error of a median, without the division
by the root of the count."""
_NOISE = 3.0
"""A difference of up to this many standard errors counts as none."""

_TRIAL, _TRIAL_EVERY = 32, 1024
"""`_TRIAL` of each `_TRIAL_EVERY` grid points are a trial (see `Pacing`)."""
_LIMITS_TAKEN = 0.8
"""A shorter interval is taken only if the limits ask for at most this fraction of it. This prevents
flapping."""


@dataclass(frozen=True)
class Grid:
    """The due steps: multiples of base x 2^k, and, for any k, multiples of each of `milestones`.

    `changes`: (from_step, k), ascending; k is 0 before the first change.
    """

    base: int = 1
    changes: tuple[tuple[int, int], ...] = ()
    milestones: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.changes]
        if self.base < 1:
            raise ValueError(f"a grid needs a base of at least 1, not {self.base}")
        if starts != sorted(set(starts)):
            raise ValueError(f"changes must have ascending steps: {self.changes}")
        if any(not 0 <= k <= MAX_EXPONENT for _, k in self.changes):
            raise ValueError(f"exponents must be 0..{MAX_EXPONENT}: {self.changes}")

    def exponent(self, step: int) -> int:
        """The k that holds at this step."""
        return next((k for start, k in reversed(self.changes) if start <= step), 0)

    def interval(self, step: int) -> int:
        """Steps from one due step to the next, with the k that holds at this step."""
        return self.base << self.exponent(step)

    @property
    def newest_interval(self) -> int:
        """Steps from one due step to the next, once the last change holds."""
        return self.base << (self.changes[-1][1] if self.changes else 0)

    def due(self, step: int) -> bool:
        return any(step % steps == 0 for steps in (self.interval(step), *self.milestones))

    def coarsen(self, after: int) -> Grid:
        """A grid with half as many due steps, from the first point of the new grid after
        `after`."""
        return self._changed(after, +1)

    def refine(self, after: int) -> Grid:
        """A grid with twice as many due steps, from the first point of the *old* grid after
        `after`."""
        return self._changed(after, -1)

    def _changed(self, after: int, by: int) -> Grid:
        last = self.changes[-1][1] if self.changes else 0
        k = min(max(last + by, 0), MAX_EXPONENT)
        if k == last:
            return self
        # A point of the coarser of both grids is due whether a rank knows of the change or not.
        coarser = self.base << max(k, last)
        start = (after // coarser + 1) * coarser
        earlier = tuple(change for change in self.changes if change[0] < start)
        return replace(self, changes=(*earlier, (start, k))[-_CHANGES_KEPT:])


def on_grid(every: int, grid: int) -> int:
    """`every`, rounded up to a multiple of `grid`: only steps on the grid exist to choose from."""
    return -(-every // grid) * grid


def stands_in(step: int, *, before: int, commits: Container[int], every: int) -> bool:
    """Whether this commit is archived instead of a multiple of `every` that was never committed.

    It is if it is the first commit after that multiple. `before`: the commit before `step`.
    `commits`: all known commits.
    """
    due = step - step % every
    return before < due < step and due not in commits


def young(cost_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that waste the least time, to first order: sqrt(2 C M) (Young
    1974)."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that waste the least time, to higher order (Daly
    2006, eq. 37)."""
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured on one node, in seconds and bytes. None: unknown, or no such bound.

    `write_s`: how long the busiest drive writes one step. `image_bytes`: what all drives write of
    one step. `stall_s`: training time lost to persisting one image of every rank of the node.
    `failures`: how many restarts were seen; if they are too few, `mtbf_s` is None.
    `drive_writes_per_day`: how often a day the whole drive may be written.
    `drain_bytes_per_s`: how much may leave the node for a buddy or an archive.
    """

    step_s: float
    write_s: float
    image_bytes: int
    stall_s: float | None = None
    mtbf_s: float | None = None
    failures: int = 0
    drive_bytes: int | None = None
    drive_writes_per_day: float | None = None
    drain_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Interval:
    """Persist every `steps` steps (base x 2^k). `limit`: the name of the limit that decided.
    `bounds`: the interval in seconds that each limit asks for."""

    steps: int
    limit: str
    bounds: dict[str, float]


def auto_interval(
    measured: Measured,
    *,
    base: int = 1,
    duty: float = 0.8,
    stall_budget: float = 0.01,
    current: int = 0,
) -> Interval:
    """The shortest interval that the hardware allows and that the failure rate does not make
    wasteful.

    The drive writes for at most `duty` of the time. Without a known failure rate, stalls cost at
    most `stall_budget` of the time. With one, the bound is the doubling nearest to Daly's optimum
    for the stall: it wastes at most 1.061 times as much as the optimum.

    `current`: the interval in steps that holds now. It is kept if a shorter one would only just
    satisfy the limits. This does not apply to the time of a step and of a write: the planner, which
    sees steps being skipped, already hesitates to refine.
    """
    stall_s = measured.stall_s or 0.0
    bounds = {"step": measured.step_s, "write": measured.write_s / duty}
    if measured.mtbf_s is None:
        bounds["stall"] = stall_s / stall_budget
    else:
        bounds["failures"] = daly(stall_s, measured.mtbf_s) / math.sqrt(2.0)
    if measured.drive_bytes and measured.drive_writes_per_day:
        daily_bytes = measured.drive_bytes * measured.drive_writes_per_day
        bounds["wear"] = 86400.0 * measured.image_bytes / daily_bytes
    if measured.drain_bytes_per_s:
        bounds["drain"] = measured.image_bytes / measured.drain_bytes_per_s
    limit = max(bounds, key=lambda name: bounds[name])
    grid_s = base * max(measured.step_s, 1e-9)
    k = _exponent(bounds[limit] / grid_s)
    if base << k < current:
        slow = (bound for name, bound in bounds.items() if name not in ("step", "write"))
        kept = _exponent(max(slow, default=0.0) / _LIMITS_TAKEN / grid_s)
        k = max(k, min(kept, _exponent(current / base)))
    return Interval(base << k, limit, bounds)


def _exponent(intervals: float) -> int:
    """The least k for which 2^k is at least `intervals`; at most `MAX_EXPONENT`."""
    return min(max(0, math.ceil(math.log2(max(1.0, intervals)) - 1e-9)), MAX_EXPONENT)


def failures_seen(epochs: Iterable[Epoch], newest_step: int) -> tuple[int, int]:
    """(failures, steps trained between them and up to `newest_step`), from a run's epochs.

    Each epoch that went on from a step counts as a failure, although it may have begun after a
    planned stop. A run with few of both then persists too often, not too rarely. The first such
    epoch and the steps before it do not count, because it is unknown where the run began to be
    kept. Steps that were repeated count once.
    """
    parents = [one.parent.step for one in sorted(epochs, key=lambda one: one.id) if one.parent]
    if not parents:
        return 0, 0
    steps = sum(max(0, later - one) for one, later in pairwise((*parents, newest_step)))
    return len(parents) - 1, steps


@dataclass
class _Written:
    """What was written of one step so far: seconds by drive, and bytes."""

    seconds: dict[int, float] = field(default_factory=dict)
    size_bytes: int = 0


class Pacing:
    """Gathers what `auto_interval` needs, from events with their time in seconds.

    The time of a step is the time between two staged steps, each counted when the first rank staged
    it. The cost of persisting is how much longer steps take while a write is in flight (a
    difference of medians; 0 within the noise). While every step is persisted, no step is without a
    write to compare with. So 32 of each 1024 grid points, except in the first 1024, are then a
    trial in which only every second one is persisted. The step number alone says which these are.
    """

    def __init__(
        self, base: int = 1, *, drive_writes_per_day: float | None = None, copies: int = 0
    ) -> None:
        """`copies`: how many copies of other nodes' images this node keeps per own image. They wear
        its drives, too."""
        self.base = base
        self.drive_bytes: int | None = None
        self.measured: Measured | None = None
        self.interval: Interval | None = None
        self._writes_per_day = drive_writes_per_day
        self._images = 1 + copies
        self._asked = 0
        self._stall: float | None = None
        self._newest: tuple[StepId, float] | None = None
        self._steps: deque[int] = deque(maxlen=_SAMPLES)
        self._times: deque[tuple[float, bool]] = deque(maxlen=_SAMPLES)
        self._in_flight = 0
        self._wrote = False
        self._written: dict[StepId, _Written] = {}
        self._writes: deque[tuple[float, int]] = deque(maxlen=_WRITES)

    def sealed(self, id: StepId, now: float) -> None:
        """A rank staged this step."""
        if self._newest is not None:
            before, at = self._newest
            if id <= before:
                return
            if id.epoch == before.epoch:
                self._steps.append(id.step - before.step)
                self._times.append(((now - at) / (id.step - before.step), self._wrote))
        self._newest, self._wrote = (id, now), self._in_flight > 0

    def began(self) -> None:
        """A write is in flight."""
        self._in_flight += 1
        self._wrote = True

    def ended(self) -> None:
        """A write is no longer in flight."""
        self._in_flight -= 1

    def wrote(self, id: StepId, drive: int, *, seconds: float, size_bytes: int) -> None:
        """A rank's image of this step is durable."""
        written = self._written.setdefault(id, _Written())
        written.seconds[drive] = written.seconds.get(drive, 0.0) + seconds
        written.size_bytes += size_bytes

    def durable(self, id: StepId, epochs: Iterable[Epoch]) -> Interval | None:
        """All ranks of this node wrote this step. Returns the interval from now on; None: too few
        samples yet."""
        if (written := self._written.get(id)) is not None:
            self._writes.append((max(written.seconds.values()), written.size_bytes))
        self._written = {other: one for other, one in self._written.items() if other > id}
        if self._newest is None or len(self._times) < _ENOUGH or not self._writes:
            return None
        step_s = median(one for one, _ in self._times)
        write_s = median(seconds for seconds, _ in self._writes)
        newest = self._newest[0].step
        failures, steps = failures_seen(epochs, newest)
        lost_s = self._stall_s(max(median(self._steps), write_s / max(step_s, 1e-9)))
        self._stall = self._stall if lost_s is None else lost_s
        self.measured = Measured(
            step_s=step_s,
            write_s=write_s,
            image_bytes=int(median(size for _, size in self._writes)) * self._images,
            stall_s=self._stall,
            mtbf_s=steps * step_s / failures if steps and failures >= ENOUGH_FAILURES else None,
            failures=failures,
            drive_bytes=self.drive_bytes,
            drive_writes_per_day=self._writes_per_day,
        )
        # The planner sees steps being skipped and so knows better how much the drive can take.
        # Hence duty=1.0: no share of the drive's time is held back.
        self.interval = auto_interval(self.measured, base=self.base, duty=1.0, current=self._asked)
        self._asked, at = self.interval.steps, newest // self.base
        if self._asked == self.base and at >= _TRIAL_EVERY and at % _TRIAL_EVERY < _TRIAL:
            self.interval = replace(self.interval, steps=2 * self.base, limit="trial")
        return self.interval

    def _stall_s(self, steps: float) -> float | None:
        """Training time lost to one image whose write lasts `steps` steps. None: there are too few
        samples to compare."""
        kinds = [[one for one, wrote in self._times if wrote is kind] for kind in (True, False)]
        if min(map(len, kinds)) < _ENOUGH:
            return None
        longer = median(kinds[0]) - median(kinds[1])
        noise = math.hypot(*(_deviation(kind) for kind in kinds))
        return steps * longer if longer > _NOISE * noise else 0.0


def _deviation(samples: list[float]) -> float:
    """Robust estimate of the standard error of the median of these samples."""
    middle = median(samples)
    return _DEVIATION * median(abs(one - middle) for one in samples) / math.sqrt(len(samples))
