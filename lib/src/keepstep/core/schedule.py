"""Which steps are due: a pure function of the step, so that all ranks pick the same ones.

A `Grid` has every multiple of base x 2^k. Who still has an older, smaller k has all of those and
more; who has a larger k has a part of them: so ranks that learn of a change at different times
still meet. A change carries the step from which it holds, chosen by rank 0 ahead of every rank.

Also here: how long the interval should be, from what was measured (`auto_interval`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_EXPONENT = 20
_CHANGES_KEPT = 8


@dataclass(frozen=True)
class Grid:
    """Multiples of base x 2^k. `changes`: (from_step, k), ascending; k is 0 before the first."""

    base: int = 1
    changes: tuple[tuple[int, int], ...] = ()

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
        """Steps between two due ones, as it holds at this step."""
        return self.base << self.exponent(step)

    def due(self, step: int) -> bool:
        return step % self.interval(step) == 0

    def coarsen(self, after: int) -> Grid:
        """Half as many steps, from the first point of the new grid beyond `after`."""
        return self._changed(after, +1)

    def refine(self, after: int) -> Grid:
        """Twice as many steps, from the first point of the *old* grid beyond `after`."""
        return self._changed(after, -1)

    def _changed(self, after: int, by: int) -> Grid:
        last = self.changes[-1][1] if self.changes else 0
        k = min(max(last + by, 0), MAX_EXPONENT)
        if k == last:
            return self
        # A point of the coarser of both grids: it is due for who knows the change and who does not.
        coarser = self.base << max(k, last)
        start = (after // coarser + 1) * coarser
        earlier = tuple(change for change in self.changes if change[0] < start)
        return Grid(self.base, (*earlier, (start, k))[-_CHANGES_KEPT:])


def young(cost_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that waste least, first order: sqrt(2 C M) (Young 1974)."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """The higher-order optimum (Daly 2006, eq. 37): seconds of work between two checkpoints."""
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one node saw. Seconds and bytes; None: unknown, or no such bound.

    `stall_s`: training time lost to persisting one image of every rank of the node.
    `drive_writes_per_day`: how often a day the drive may be written in full.
    `drain_bytes_per_s`: what may leave the node for a buddy or an archive.
    """

    step_s: float
    write_s: float
    image_bytes: int
    stall_s: float = 0.0
    mtbf_s: float | None = None
    drive_bytes: int | None = None
    drive_writes_per_day: float | None = None
    drain_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Interval:
    """Persist every `steps` steps (base x 2^k). `bounds`: seconds that each limit asks for."""

    steps: int
    limit: str
    bounds: dict[str, float]


def auto_interval(
    measured: Measured, *, base: int = 1, duty: float = 0.8, stall_budget: float = 0.01
) -> Interval:
    """The least interval that the hardware allows and the failure rate does not call a waste.

    The drive writes for at most `duty` of the time. Without a known failure rate, stalls cost
    at most `stall_budget` of the time; with one, Daly's optimum for the stall is the bound.
    """
    bounds = {"step": measured.step_s, "write": measured.write_s / duty}
    if measured.mtbf_s is None:
        bounds["stall"] = measured.stall_s / stall_budget
    else:
        bounds["failures"] = daly(measured.stall_s, measured.mtbf_s)
    if measured.drive_bytes and measured.drive_writes_per_day:
        daily_bytes = measured.drive_bytes * measured.drive_writes_per_day
        bounds["wear"] = 86400.0 * measured.image_bytes / daily_bytes
    if measured.drain_bytes_per_s:
        bounds["drain"] = measured.image_bytes / measured.drain_bytes_per_s
    limit = max(bounds, key=lambda name: bounds[name])
    steps = bounds[limit] / max(measured.step_s, 1e-9)
    k = max(0, math.ceil(math.log2(max(1.0, steps / base)) - 1e-9))
    return Interval(base << min(k, MAX_EXPONENT), limit, bounds)
