"""Which steps are written, and when.

A `StepGrid` says which steps are due: a pure function of the step, so that all ranks pick the same
ones. It contains every multiple of base x 2^k. The grid of a smaller k contains all points of the
grid of a larger k. So ranks that learn of a change of k at different times still have due steps in
common. A change carries the step from which it holds, which lies ahead of every rank. How long the
interval should be (`choose_persist_interval`) follows from what was measured of the run
(`PersistCostMeasurements`).

A step is committed only when *every* rank has written it, so the ranks of a node must not choose
independently. The `PersistPlanner` has one step in flight, the *target*. A rank writes the target
once it has sealed it. When the target is done, the next target is the newest due step that every
rank still holds or has not passed yet. The due steps before it are skipped and counted. Then the
grid is coarsened: ranks of other nodes would skip other steps, and on a coarser grid all write the
same steps again. The grid is never refined below the interval that `set_least_interval` sets.
Nothing is queued in memory. With two slots per rank (`SlotTable` then waits for the writer) every
due image is written, in order, each rank at its own pace.

A rank writes one image at a time, so persisting pins at most one slot of a rank. The host pins the
slot of a `Write` before it does anything else, and reports the end with `on_write_end`.

`RankStepComparison` finds ranks that save different steps: no step becomes whole, and only the
script can end that. Ranks in lock step (each step has a collective) are never far apart: when a
rank has staged a step, every other rank has returned from the `save` before it, so at most two
steps of one rank are not yet staged by another. A rank that lacks more is one of three:

- it is past these steps (it staged a newer one, and the other rank is past one of its steps, so it
  is not just a rank that saves fewer of the same steps), or has called `close()`: it never saves
  them. This is certain at once;
- it has never saved a step of this epoch, although it has its lease: the others wait for it, so
  they would not have gone on for long;
- it stopped saving. Without collectives, a rank may also be in a long evaluation.

The last two are only found after a while. The message states what was seen, so it is right in any
case. Discarded and skipped steps were saved, too: a rank that lost steps is not named for them.
Times are passed in.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from keepstep.steps import Epoch, EpochId, StepId

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
"""`_TRIAL` of each `_TRIAL_EVERY` grid points are a trial (see `PersistCostMeasurements`)."""
_STALL_BUDGET = 0.01
_LIMITS_TAKEN = 0.8
"""A shorter interval is taken only if the limits ask for at most this fraction of it. This prevents
flapping."""


@dataclass(frozen=True)
class StepGrid:
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

    def interval(self, step: int) -> int:
        """Steps from one due step to the next, with the k that holds at this step."""
        return self.base << next((k for start, k in reversed(self.changes) if start <= step), 0)

    @property
    def newest_interval(self) -> int:
        """Steps from one due step to the next, once the last change holds."""
        return self.base << (self.changes[-1][1] if self.changes else 0)

    def due(self, step: int) -> bool:
        return any(step % steps == 0 for steps in (self.interval(step), *self.milestones))

    def coarsen(self, after: int) -> StepGrid:
        """A grid with half as many due steps, from the first point of the new grid after
        `after`."""
        return self._changed(after, +1)

    def refine(self, after: int) -> StepGrid:
        """A grid with twice as many due steps, from the first point of the *old* grid after
        `after`."""
        return self._changed(after, -1)

    def _changed(self, after: int, by: int) -> StepGrid:
        last = self.changes[-1][1] if self.changes else 0
        k = min(max(last + by, 0), MAX_EXPONENT)
        if k == last:
            return self
        # A point of the coarser of both grids is due whether a rank knows of the change or not.
        coarser = self.base << max(k, last)
        start = (after // coarser + 1) * coarser
        earlier = tuple(change for change in self.changes if change[0] < start)
        return replace(self, changes=(*earlier, (start, k))[-_CHANGES_KEPT:])


def round_up_to_grid(every: int, grid: int) -> int:
    """`every`, rounded up to a multiple of `grid`: only steps on the grid exist to choose from."""
    return -(-every // grid) * grid


def is_stand_in(step: int, *, before: int, commits: Container[int], every: int) -> bool:
    """Whether this commit is archived instead of a multiple of `every` that was never committed.

    It is if it is the first commit after that multiple. `before`: the commit before `step`.
    `commits`: all known commits.
    """
    due = step - step % every
    return before < due < step and due not in commits


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that waste the least time, to higher order (Daly
    2006, eq. 37): sqrt(2 C M) (Young 1974) and two corrections."""
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * cost_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


@dataclass(frozen=True, kw_only=True)
class NodeMeasurements:
    """What was measured on one node, in seconds and bytes. None: unknown, or no such bound.

    `write_s`: how long the busiest drive writes one step. `image_bytes`: what all drives write of
    one step. `stall_s`: training time lost to persisting one image of every rank of the node.
    `failures`: how many restarts were seen; if they are too few, `mtbf_s` is None.
    `drive_writes_per_day`: how often a day the whole drive may be written.
    """

    step_s: float
    write_s: float
    image_bytes: int
    stall_s: float | None = None
    mtbf_s: float | None = None
    failures: int = 0
    drive_bytes: int | None = None
    drive_writes_per_day: float | None = None


@dataclass(frozen=True)
class PersistInterval:
    """Persist every `steps` steps (base x 2^k). `limit`: the name of the limit that decided.
    `bounds`: the interval in seconds that each limit asks for."""

    steps: int
    limit: str
    bounds: dict[str, float]


def choose_persist_interval(
    measured: NodeMeasurements, *, base: int = 1, current: int = 0
) -> PersistInterval:
    """The shortest interval that the hardware allows and that the failure rate does not make
    wasteful.

    The drive may write all the time: the planner sees steps being skipped and so knows better how
    much it can take. Without a known failure rate, stalls cost at most `_STALL_BUDGET` of the time.
    With one, the bound is the doubling nearest to Daly's optimum for the stall: it wastes at most
    1.061 times as much as the optimum.

    `current`: the interval in steps that holds now. It is kept if a shorter one would only just
    satisfy the limits. This does not apply to the time of a step and of a write: the planner, which
    sees steps being skipped, already hesitates to refine.
    """
    stall_s = measured.stall_s or 0.0
    bounds = {"step": measured.step_s, "write": measured.write_s}
    if measured.mtbf_s is None:
        bounds["stall"] = stall_s / _STALL_BUDGET
    else:
        bounds["failures"] = daly_interval_s(stall_s, measured.mtbf_s) / math.sqrt(2.0)
    if measured.drive_bytes and measured.drive_writes_per_day:
        daily_bytes = measured.drive_bytes * measured.drive_writes_per_day
        bounds["wear"] = 86400.0 * measured.image_bytes / daily_bytes
    limit = max(bounds, key=lambda name: bounds[name])
    grid_s = base * max(measured.step_s, 1e-9)
    k = _exponent(bounds[limit] / grid_s)
    if base << k < current:
        slow = (bound for name, bound in bounds.items() if name not in ("step", "write"))
        kept = _exponent(max(slow, default=0.0) / _LIMITS_TAKEN / grid_s)
        k = max(k, min(kept, _exponent(current / base)))
    return PersistInterval(base << k, limit, bounds)


def _exponent(intervals: float) -> int:
    """The least k for which 2^k is at least `intervals`; at most `MAX_EXPONENT`."""
    return min(max(0, math.ceil(math.log2(max(1.0, intervals)) - 1e-9)), MAX_EXPONENT)


def count_failures_and_steps(epochs: Iterable[Epoch], newest_step: int) -> tuple[int, int]:
    """(failures, steps trained between them and up to `newest_step`), from a run's epochs.

    Each epoch that went on from a step counts as a failure, although it may have begun after a
    planned stop. A run with few of both then persists too often, not too rarely. The first such
    epoch and the steps before it do not count, because it is unknown where the run began to be
    kept. Steps that were repeated count once.
    """
    parents = [
        epoch.parent.step for epoch in sorted(epochs, key=lambda epoch: epoch.id) if epoch.parent
    ]
    if not parents:
        return 0, 0
    steps = sum(max(0, later - earlier) for earlier, later in pairwise((*parents, newest_step)))
    return len(parents) - 1, steps


class PersistCostMeasurements:
    """Gathers what `choose_persist_interval` needs, from events with their time in seconds.

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
        self.measured: NodeMeasurements | None = None
        self.interval: PersistInterval | None = None
        self._writes_per_day = drive_writes_per_day
        self._images = 1 + copies
        self._asked = 0
        self._stall: float | None = None
        self._newest: tuple[StepId, float] | None = None
        self._steps: deque[int] = deque(maxlen=_SAMPLES)
        self._times: deque[tuple[float, bool]] = deque(maxlen=_SAMPLES)
        self._in_flight = 0
        self._wrote = False
        self._written: dict[StepId, list[tuple[int, float, int]]] = {}
        """Of each step that not all ranks have written: drive, seconds and bytes of each write."""
        self._writes: deque[tuple[float, int]] = deque(maxlen=_WRITES)

    def sealed(self, step_id: StepId, now: float) -> None:
        """A rank staged this step."""
        if self._newest is not None:
            before, at = self._newest
            if step_id <= before:
                return
            if step_id.epoch == before.epoch:
                self._steps.append(step_id.step - before.step)
                self._times.append(((now - at) / (step_id.step - before.step), self._wrote))
        self._newest, self._wrote = (step_id, now), self._in_flight > 0

    def on_write_began(self) -> None:
        """A write is in flight."""
        self._in_flight += 1
        self._wrote = True

    def on_write_ended(self) -> None:
        """A write is no longer in flight."""
        self._in_flight -= 1

    def wrote(self, step_id: StepId, drive: int, *, seconds: float, size_bytes: int) -> None:
        """A rank's image of this step is durable."""
        self._written.setdefault(step_id, []).append((drive, seconds, size_bytes))

    def record_durable_step(
        self, step_id: StepId, epochs: Iterable[Epoch]
    ) -> PersistInterval | None:
        """All ranks of this node wrote this step. Returns the interval from now on; None: too few
        samples yet."""
        if written := self._written.get(step_id):
            busy_s: dict[int, float] = {}
            for drive, seconds, _ in written:
                busy_s[drive] = busy_s.get(drive, 0.0) + seconds
            self._writes.append((max(busy_s.values()), sum(size for _, _, size in written)))
        self._written = {other: value for other, value in self._written.items() if other > step_id}
        if self._newest is None or len(self._times) < _ENOUGH or not self._writes:
            return None
        step_s = median(seconds for seconds, _ in self._times)
        write_s = median(seconds for seconds, _ in self._writes)
        newest = self._newest[0].step
        failures, steps = count_failures_and_steps(epochs, newest)
        lost_s = self._stall_s(max(median(self._steps), write_s / max(step_s, 1e-9)))
        self._stall = self._stall if lost_s is None else lost_s
        self.measured = NodeMeasurements(
            step_s=step_s,
            write_s=write_s,
            image_bytes=int(median(size for _, size in self._writes)) * self._images,
            stall_s=self._stall,
            mtbf_s=steps * step_s / failures if steps and failures >= ENOUGH_FAILURES else None,
            failures=failures,
            drive_bytes=self.drive_bytes,
            drive_writes_per_day=self._writes_per_day,
        )
        self.interval = choose_persist_interval(self.measured, base=self.base, current=self._asked)
        self._asked, at = self.interval.steps, newest // self.base
        if self._asked == self.base and at >= _TRIAL_EVERY and at % _TRIAL_EVERY < _TRIAL:
            self.interval = replace(self.interval, steps=2 * self.base, limit="trial")
        return self.interval

    def _stall_s(self, steps: float) -> float | None:
        """Training time lost to one image whose write lasts `steps` steps. None: there are too few
        samples to compare."""
        kinds = [
            [seconds for seconds, wrote in self._times if wrote is kind] for kind in (True, False)
        ]
        if min(map(len, kinds)) < _ENOUGH:
            return None
        longer = median(kinds[0]) - median(kinds[1])
        noise = math.hypot(*(_deviation(kind) for kind in kinds))
        return steps * longer if longer > _NOISE * noise else 0.0


def _deviation(samples: list[float]) -> float:
    """Robust estimate of the standard error of the median of these samples."""
    middle = median(samples)
    return _DEVIATION * median(abs(sample - middle) for sample in samples) / math.sqrt(len(samples))


CALM_BEFORE_REFINING = 4
"""The grid is refined after this many targets in a row that each took less than half an
interval."""

_DONE_KEPT = 64


@dataclass(frozen=True)
class Write:
    """Pin the slot of `rank` that holds `id` and persist the image; then call `on_write_end`."""

    rank: int
    id: StepId


@dataclass
class PersistCounts:
    """Counts since the start. `skipped`: steps that were due, but the writer was busy until it was
    too late. `abandoned`: targets that some rank did not seal (it passed the step, or died) or
    could not write. `failed`: images that a rank could not write."""

    persisted: int = 0
    skipped: int = 0
    abandoned: int = 0
    failed: int = 0


@dataclass
class _Rank:
    """What the planner knows of one rank.

    `failed`: the last step that could not be written. `held`: sealed steps in memory. `done`: steps
    that were written. `writing`: the step that is being written. `passed`: the newest step that the
    rank sealed. `gone`: its trainer died.
    """

    failed: StepId | None = None
    held: set[StepId] = field(default_factory=set)
    done: set[StepId] = field(default_factory=set)
    writing: StepId | None = None
    passed: StepId | None = None
    gone: bool = False

    def can_have(self, step_id: StepId) -> bool:
        """Whether the rank has sealed this step or may still seal it."""
        return self.has_sealed(step_id) or self.may_seal(step_id)

    def can_write(self, step_id: StepId) -> bool:
        """Whether the rank could write this step now and has not written it."""
        return self.writing is None and step_id in self.held and step_id not in self.done

    def has_sealed(self, step_id: StepId) -> bool:
        """Whether the rank holds the image, has written it, or is writing it."""
        return step_id in self.held or step_id in self.done or step_id == self.writing

    def may_seal(self, step_id: StepId) -> bool:
        """Whether the rank may still seal this step. A trainer that died comes back in another
        epoch, so it seals no more steps of this one."""
        if self.passed is None:
            return not self.gone
        return self.passed < step_id and not (self.gone and self.passed.epoch == step_id.epoch)


class PersistPlanner:
    """Decides the writes of one node: events in, `Write`s out. `ranks`: the ranks of this node.

    Each event returns the writes to start now. An event may be reported twice. Events of ranks of
    other nodes change nothing.
    """

    def __init__(self, ranks: Iterable[int], grid: StepGrid, *, slots: int = 4) -> None:
        self._ranks = {rank: _Rank() for rank in ranks}
        self._every = slots <= 2
        self._pending: set[StepId] = set()
        self._demanded: set[StepId] = set()
        self._target: StepId | None = None
        self._calm = 0
        self._skipped_since_change = 0
        self.least = 0
        self.grid = grid
        self.counts = PersistCounts()
        self.durable: StepId | None = None

    @property
    def step_in_flight(self) -> StepId | None:
        """The step in flight, or None (always None with two slots)."""
        return self._target

    @property
    def pending_steps(self) -> frozenset[StepId]:
        """The steps that some rank has still to write, without the one in flight."""
        return frozenset(self._pending)

    @property
    def has_no_pending_writes(self) -> bool:
        """Whether no sealed image is being written or waits for it."""
        if self._pending or any(rank.writing is not None for rank in self._ranks.values()):
            return False
        target = self._target
        return target is None or not any(rank.has_sealed(target) for rank in self._ranks.values())

    # --- events --------------------------------------------------------------------------

    def sealed(self, rank: int, step_id: StepId) -> tuple[Write, ...]:
        """The image of this step is complete in a slot of the rank."""
        if (state := self._ranks.get(rank)) is None:
            return ()
        state.gone = False
        if state.failed != step_id:
            state.held.add(step_id)
        state.passed = step_id if state.passed is None else max(state.passed, step_id)
        if (self.grid.due(step_id.step) or step_id in self._demanded) and self._is_new(step_id):
            self._pending.add(step_id)
        return self._advance()

    def on_overwritten(self, rank: int, step_id: StepId) -> tuple[Write, ...]:
        """The slot that held this step was assigned again."""
        if (state := self._ranks.get(rank)) is None:
            return ()
        state.held.discard(step_id)
        return self._advance()

    def on_write_end(self, rank: int, step_id: StepId, *, ok: bool = True) -> tuple[Write, ...]:
        """A `Write` ended, or a shard was found on disk. Not `ok`: the write failed and is not
        tried again."""
        if (state := self._ranks.get(rank)) is None:
            return ()
        state.writing = None if state.writing == step_id else state.writing
        if ok:
            state.done = {*sorted(state.done)[-_DONE_KEPT:], step_id}  # this one, however old
        else:  # its image is no longer offered, so the step becomes impossible
            state.held.discard(step_id)
            state.failed = step_id
            self.counts.failed += 1
        return self._advance()

    def missed(self, step: int) -> None:
        """A rank had no slot for this step: if it was due, due steps are too close."""
        self._skip(int(self.grid.due(step)))

    def on_shard_removed(self, rank: int, step_id: StepId) -> None:
        """The rank's shard of this step is no longer on any volume, so it may be written again."""
        if (state := self._ranks.get(rank)) is not None:
            state.done.discard(step_id)

    def record_trainer_death(self, rank: int) -> tuple[Write, ...]:
        """The trainer died: it seals no more images of this epoch. Images that it sealed stay."""
        if (state := self._ranks.get(rank)) is None:
            return ()
        state.gone = True
        return self._advance()

    def forget_dead_steps(self, dead: Callable[[StepId], bool]) -> tuple[Write, ...]:
        """Forget the steps that are dead because a new epoch began: nobody needs them on disk."""
        for rank in self._ranks.values():
            rank.held = {step_id for step_id in rank.held if not dead(step_id)}
            rank.done = {step_id for step_id in rank.done if not dead(step_id)}
        self._pending = {step_id for step_id in self._pending if not dead(step_id)}
        self._demanded = {step_id for step_id in self._demanded if not dead(step_id)}
        if self._target is not None and dead(self._target):
            self._drop_target()
        return self._advance()

    def retry_writes(self, rank: int, held: Collection[StepId]) -> None:
        """The images that the rank's slots hold: those that could not be written may be by now."""
        if (state := self._ranks.get(rank)) is not None:
            state.held |= set(held) - state.done
            state.failed = None

    def flush(self, ids: Collection[StepId] | None = None, *, newest: int = 2) -> tuple[Write, ...]:
        """Persist the steps in `ids`, whatever the grid says. `ids` None: the `newest` ones that
        all ranks hold or have written.

        The newest step is written first, because it counts most when a deadline is near.
        """
        for step_id in self.list_common_steps()[-newest:] if ids is None else ids:
            if self._is_new(step_id):
                self._demanded.add(step_id)
                if any(step_id in rank.held for rank in self._ranks.values()):
                    self._pending.add(step_id)
        return self._advance()

    def set_least_interval(self, least: int) -> None:
        """Due steps must be at least `least` steps apart. The grid gets there by one doubling (or
        halving) with each finished step, because a change must hold from a step that no rank has
        reached."""
        self.least = least

    # --- asking --------------------------------------------------------------------------

    def list_common_steps(self) -> list[StepId]:
        """Steps that every rank of this node holds in memory or has written, oldest first."""
        each = [rank.held | rank.done for rank in self._ranks.values()]
        return sorted(set.intersection(*each)) if each else []

    def can_have(self, rank: int, step_id: StepId) -> bool:
        """Whether the rank has this step, as far as this planner knows, or may still seal it."""
        return (state := self._ranks.get(rank)) is None or state.can_have(step_id)

    def is_written_by_all(self, step_id: StepId) -> bool:
        """Whether every rank of this node has written this step, as far as this planner knows."""
        return bool(self._ranks) and all(step_id in rank.done for rank in self._ranks.values())

    # --- deciding ------------------------------------------------------------------------

    def _advance(self) -> tuple[Write, ...]:
        lost = {step_id for step_id in self._pending if not self._possible(step_id)}
        self._pending -= lost
        self._demanded = {step_id for step_id in self._demanded if self._possible(step_id)}
        self._skip(len(lost))
        writes = self._each_at_its_pace() if self._every else self._one_in_flight()
        for write in writes:
            self._ranks[write.rank].writing = write.id
        return tuple(writes)

    def _one_in_flight(self) -> list[Write]:
        if self._target is not None:
            # every rank has sealed it or still may, and at least one has
            begun = any(rank.has_sealed(self._target) for rank in self._ranks.values())
            if not (begun and self._possible(self._target)):
                self.counts.abandoned += 1
                self._drop_target()
        if self._target is not None and self.is_written_by_all(self._target):
            self._finish(self._target)
        self._yield_to_flush()
        if self._target is None:
            self._choose()
        return [
            Write(rank, self._target)
            for rank, state in self._ranks.items()
            if self._target is not None and state.can_write(self._target)
        ]

    def _each_at_its_pace(self) -> list[Write]:
        for step_id in sorted(self._pending):
            if self.is_written_by_all(step_id):
                self._pending.discard(step_id)
                self._finish(step_id)
        writes = []
        for rank, state in self._ranks.items():
            if waiting := [step_id for step_id in self._pending if state.can_write(step_id)]:
                writes.append(Write(rank, min(waiting)))
        return writes

    def _choose(self) -> None:
        """Choose the next target: the newest demanded step, else the newest due one. Due steps that
        are older are skipped."""
        if not self._pending:
            return
        demanded = self._pending & self._demanded
        target = max(
            {step_id for step_id in demanded if self._sealed_by_all(step_id)}
            or demanded
            or self._pending
        )
        passed = {step_id for step_id in self._pending - self._demanded if step_id < target}
        self._pending -= {target, *passed}
        self._target = target
        self._skip(len(passed))

    def _yield_to_flush(self) -> None:
        """Give up a target that some rank has not sealed yet (or never will), if a demanded step
        that all ranks have sealed waits. So the target does not hold up a flush."""
        if self._target is None or self._sealed_by_all(self._target):
            return
        if any(self._sealed_by_all(step_id) for step_id in self._pending & self._demanded):
            if any(rank.has_sealed(self._target) for rank in self._ranks.values()):
                self._pending.add(self._target)
            self._target = None

    def _finish(self, step_id: StepId) -> None:
        self.counts.persisted += 1
        self.durable = step_id if self.durable is None else max(self.durable, step_id)
        self._demanded.discard(step_id)
        self._target = None
        self._adapt(step_id)

    def _adapt(self, step_id: StepId) -> None:
        """Coarsen the grid if steps were skipped or are too close. Refine it if writing would keep
        up with half the interval, too."""
        newest = max((rank.passed for rank in self._ranks.values() if rank.passed), default=step_id)
        if newest.epoch != step_id.epoch:
            return
        if self._skipped_since_change or self.grid.newest_interval < self.least:
            self.grid = self.grid.coarsen(newest.step + 1)
            self._skipped_since_change = self._calm = 0
            return
        quick = 2 * (newest.step - step_id.step) < self.grid.interval(step_id.step)
        self._calm = self._calm + 1 if quick else 0
        if self._calm >= CALM_BEFORE_REFINING and self.grid.newest_interval > self.least:
            self.grid = self.grid.refine(newest.step + 1)
            self._calm = 0

    def _skip(self, count: int) -> None:
        self.counts.skipped += count
        self._skipped_since_change += count

    def _drop_target(self) -> None:
        if self._target is not None:
            self._demanded.discard(self._target)
        self._target = None

    def _sealed_by_all(self, step_id: StepId) -> bool:
        return all(rank.has_sealed(step_id) for rank in self._ranks.values())

    def _possible(self, step_id: StepId) -> bool:
        return all(rank.can_have(step_id) for rank in self._ranks.values())

    def _is_new(self, step_id: StepId) -> bool:
        return step_id != self._target and not self.is_written_by_all(step_id)


LEAST = 3
"""So many steps must be missing: one more than in lock step."""

NEVER_SAVED_S = 5.0
"""How long a rank that never saved a step of its epoch may lag behind."""

STOPPED_S = 60.0
"""How long a rank that did save steps may lag behind."""

_REMEMBERED = 32


class MissingStepsReason(enum.Enum):
    """Why a rank lacks the steps of another one."""

    PASSED = "it saves other steps"
    CLOSED = "it has called close()"
    NEVER_SAVED = "it has saved no step yet"
    STOPPED = "it saves no steps any more"


@dataclass(frozen=True)
class RankStagingDifference:
    """Rank `lacking` has staged none of the steps that rank `saving` staged since `common`, the
    newest step of both. None: they have no step in common."""

    saving: int
    lacking: int
    reason: MissingStepsReason
    common: StepId | None

    def __str__(self) -> str:
        since = "" if self.common is None else f" since step {self.common.step}"
        return (
            f"rank {self.lacking} saves none of the steps that rank {self.saving} saves{since}"
            f" ({self.reason.value}), so no newer step is committed or can be restored: call"
            " save(step) on every rank, with the same steps"
        )


@dataclass
class _Saved:
    """`staged`: the newest steps of the epoch. `lost`: how many steps were saved and not staged, by
    the number of the last of them. `at`: when the rank came, or last saved a step."""

    at: float
    staged: deque[StepId] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    lost: dict[int, int] = field(default_factory=dict)
    present: bool = True
    closed: bool = False

    @property
    def newest(self) -> StepId | None:
        return self.staged[-1] if self.staged else None


class RankStepComparison:
    """What the ranks of one machine saved in the newest epoch. `difference`: what to tell them."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Saved] = {}
        self._epoch: EpochId | None = None
        self._common: StepId | None = None
        self._found: RankStagingDifference | None = None

    # --- events --------------------------------------------------------------------------

    def note_trainer_joined(self, rank: int, now: float) -> None:
        """A trainer has the rank's lease now."""
        known = self._ranks.setdefault(rank, _Saved(now))
        known.present, known.closed, known.at = True, False, now

    def record_trainer_exit(self, rank: int, *, closed: bool) -> None:
        """The rank's trainer is gone; `closed`: it gave the lease back."""
        if (known := self._ranks.get(rank)) is not None:
            known.present, known.closed = False, closed

    def epoch_began(self, epoch: EpochId, now: float) -> None:
        """A trainer works in this epoch."""
        if self._epoch is None or epoch > self._epoch:
            self._epoch, self._common, self._found = epoch, None, None
            self._ranks = {rank: known for rank, known in self._ranks.items() if known.present}
            for known in self._ranks.values():
                known.staged.clear()
                known.lost.clear()
                known.at = now

    def staged(self, rank: int, step_id: StepId, now: float) -> None:
        """The rank has staged this step."""
        self.note_trainer_joined(rank, now)
        self.epoch_began(step_id.epoch, now)
        if step_id.epoch != self._epoch:
            return
        self._ranks[rank].staged.append(step_id)
        if all(step_id in known.staged for known in self._involved()):
            self._common = step_id
            for known in self._ranks.values():
                known.lost = {at: count for at, count in known.lost.items() if at > step_id.step}

    def record_unstaged_steps(self, rank: int, step: int, now: float, *, count: int = 1) -> None:
        """The rank has saved `count` steps that were not staged, the last of them `step`."""
        self.note_trainer_joined(rank, now)
        lost = self._ranks[rank].lost
        lost[step] = lost.get(step, 0) + count

    # --- asking --------------------------------------------------------------------------

    @property
    def released_ranks(self) -> frozenset[int]:
        """The ranks that gave their lease back in this epoch: they save no more of its steps."""
        return frozenset(rank for rank, known in self._ranks.items() if known.closed)

    def difference(self, now: float) -> RankStagingDifference | None:
        """Which rank lacks the steps of which other rank; None: no rank does. It stays the same
        while any rank does, because it is a message."""
        found = next(self._differences(now), None)
        if found is None or self._found is None:
            self._found = found
        return self._found

    def _involved(self) -> list[_Saved]:
        """Without ranks whose trainer died: a restart decides about them."""
        return [known for known in self._ranks.values() if known.present or known.closed]

    def _differences(self, now: float) -> Iterator[RankStagingDifference]:
        saving = {rank: known for rank, known in self._ranks.items() if known.staged}
        for lacking, other in sorted(self._ranks.items()):
            for rank, known in sorted(saving.items()):
                reason = None if rank == lacking else self._reason(known, other, now)
                if reason is not None:
                    yield RankStagingDifference(rank, lacking, reason, self._common)

    def _reason(self, saving: _Saved, lacking: _Saved, now: float) -> MissingStepsReason | None:
        newest = lacking.newest
        missing = self._missing(saving, lacking)
        least = LEAST + sum(lacking.lost.values())
        if lacking.closed:
            return MissingStepsReason.CLOSED if len(missing) >= least else None
        if not lacking.present:
            return None
        if len(_before(newest, missing)) >= least and _before(
            saving.newest, self._missing(lacking, saving)
        ):
            return MissingStepsReason.PASSED
        silent_s, never = now - lacking.at, newest is None
        if len(missing) < least or silent_s < (NEVER_SAVED_S if never else STOPPED_S):
            return None
        return MissingStepsReason.NEVER_SAVED if never else MissingStepsReason.STOPPED

    def _missing(self, saving: _Saved, lacking: _Saved) -> list[StepId]:
        steps = (step for step in saving.staged if self._common is None or step > self._common)
        return [step for step in steps if step not in lacking.staged]


def _before(newest: StepId | None, steps: list[StepId]) -> list[StepId]:
    return [step for step in steps if newest is not None and step < newest]
