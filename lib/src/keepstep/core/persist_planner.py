"""Which staged images are written to the local volumes, and when.

A step is committed only when *every* rank has written it, so the ranks of a node must not choose
independently. The planner has one step in flight, the *target*. A rank writes the target once it
has sealed it. When the target is done, the next target is the newest due step that every rank
still holds or has not passed yet. The due steps before it are skipped and counted. Then the grid is
coarsened: ranks of other nodes would skip other steps, and on a coarser grid all write the same
steps again. The grid is never refined below the interval that `pace` sets. Nothing is queued in
memory.

With two slots per rank (`SlotTable` then waits for the writer) every due image is written, in
order, each rank at its own pace.

A rank writes one image at a time, so persisting pins at most one slot of a rank. The host pins the
slot of a `Write` before it does anything else, and reports the end with `written`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from keepstep.core.schedule import Grid
from keepstep.steps import StepId

CALM_BEFORE_REFINING = 4
"""The grid is refined after this many targets in a row that each took less than half an
interval."""

_DONE_KEPT = 64


@dataclass(frozen=True)
class Write:
    """Pin the slot of `rank` that holds `id` and persist the image; then call `written`."""

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

    def can_have(self, id: StepId) -> bool:
        """Whether the rank has sealed this step or may still seal it."""
        return self.has_sealed(id) or self.may_seal(id)

    def could_write(self, id: StepId) -> bool:
        """Whether the rank could write this step now and has not written it."""
        return self.writing is None and id in self.held and id not in self.done

    def has_sealed(self, id: StepId) -> bool:
        """Whether the rank holds the image, has written it, or is writing it."""
        return id in self.held or id in self.done or id == self.writing

    def may_seal(self, id: StepId) -> bool:
        """Whether the rank may still seal this step. A trainer that died comes back in another
        epoch, so it seals no more steps of this one."""
        if self.passed is None:
            return not self.gone
        return self.passed < id and not (self.gone and self.passed.epoch == id.epoch)


class PersistPlanner:
    """Decides the writes of one node: events in, `Write`s out. `ranks`: the ranks of this node.

    Each event returns the writes to start now. An event may be reported twice. Events of ranks of
    other nodes change nothing.
    """

    def __init__(
        self, ranks: Iterable[int], grid: Grid, *, slots: int = 4, adaptive: bool = True
    ) -> None:
        self._ranks = {rank: _Rank() for rank in ranks}
        self._every = slots <= 2
        self._adaptive = adaptive
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
    def target(self) -> StepId | None:
        """The step in flight, or None (always None with two slots)."""
        return self._target

    @property
    def idle(self) -> bool:
        """Whether no sealed image is being written or waits for it."""
        if self._pending or any(one.writing is not None for one in self._ranks.values()):
            return False
        target = self._target
        return target is None or not any(one.has_sealed(target) for one in self._ranks.values())

    # --- events --------------------------------------------------------------------------

    def sealed(self, rank: int, id: StepId) -> tuple[Write, ...]:
        """The image of this step is complete in a slot of the rank."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.gone = False
        if one.failed != id:
            one.held.add(id)
        one.passed = id if one.passed is None else max(one.passed, id)
        if (self.grid.due(id.step) or id in self._demanded) and self._is_new(id):
            self._pending.add(id)
        return self._advance()

    def overwritten(self, rank: int, id: StepId) -> tuple[Write, ...]:
        """The slot that held this step was assigned again."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.held.discard(id)
        return self._advance()

    def written(self, rank: int, id: StepId, *, ok: bool = True) -> tuple[Write, ...]:
        """A `Write` ended, or a shard was found on disk. Not `ok`: the write failed and is not
        tried again."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.writing = None if one.writing == id else one.writing
        if ok:
            one.done = set(sorted(one.done | {id})[-_DONE_KEPT:])
        else:
            self._fail(rank, id)
        return self._advance()

    def removed(self, rank: int, id: StepId) -> None:
        """The rank's shard of this step is no longer on any volume, so it may be written again."""
        if (one := self._ranks.get(rank)) is not None:
            one.done.discard(id)

    def gone(self, rank: int) -> tuple[Write, ...]:
        """The trainer died: it seals no more images of this epoch. Images that it sealed stay."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.gone = True
        return self._advance()

    def forget(self, dead: Callable[[StepId], bool]) -> tuple[Write, ...]:
        """Forget the steps that are dead because a new epoch began: nobody needs them on disk."""
        for one in self._ranks.values():
            one.held = {id for id in one.held if not dead(id)}
            one.done = {id for id in one.done if not dead(id)}
        self._pending = {id for id in self._pending if not dead(id)}
        self._demanded = {id for id in self._demanded if not dead(id)}
        if self._target is not None and dead(self._target):
            self._drop_target()
        return self._advance()

    def retry(self, rank: int, held: Collection[StepId]) -> None:
        """The images that the rank's slots hold: those that could not be written may be by now."""
        if (one := self._ranks.get(rank)) is not None:
            one.held |= set(held) - one.done
            one.failed = None

    def flush(self, ids: Collection[StepId] | None = None, *, newest: int = 2) -> tuple[Write, ...]:
        """Persist the steps in `ids`, whatever the grid says. `ids` None: the `newest` ones that
        all ranks hold or have written.

        The newest step is written first, because it counts most when a deadline is near.
        """
        for id in self.common()[-newest:] if ids is None else ids:
            if self._is_new(id):
                self._demanded.add(id)
                if any(id in one.held for one in self._ranks.values()):
                    self._pending.add(id)
        return self._advance()

    def pace(self, least: int) -> None:
        """Due steps must be at least `least` steps apart. The grid gets there by one doubling (or
        halving) with each finished step, because a change must hold from a step that no rank has
        reached."""
        self.least = least

    # --- asking --------------------------------------------------------------------------

    def common(self) -> list[StepId]:
        """Steps that every rank of this node holds in memory or has written, oldest first."""
        each = [one.held | one.done for one in self._ranks.values()]
        return sorted(set.intersection(*each)) if each else []

    def can_have(self, rank: int, id: StepId) -> bool:
        """Whether the rank has this step, as far as this planner knows, or may still seal it."""
        return (one := self._ranks.get(rank)) is None or one.can_have(id)

    def is_durable(self, id: StepId) -> bool:
        """Whether every rank of this node has written this step, as far as this planner knows."""
        return bool(self._ranks) and all(id in one.done for one in self._ranks.values())

    # --- deciding ------------------------------------------------------------------------

    def _advance(self) -> tuple[Write, ...]:
        self._drop_impossible()
        writes = self._each_at_its_pace() if self._every else self._one_in_flight()
        for write in writes:
            self._ranks[write.rank].writing = write.id
        return tuple(writes)

    def _one_in_flight(self) -> list[Write]:
        if self._target is not None and not self._is_coming(self._target):
            self.counts.abandoned += 1
            self._drop_target()
        if self._target is not None and self.is_durable(self._target):
            self._finish(self._target)
        self._yield_to_flush()
        if self._target is None:
            self._choose()
        return [
            Write(rank, self._target)
            for rank, one in self._ranks.items()
            if self._target is not None and one.could_write(self._target)
        ]

    def _each_at_its_pace(self) -> list[Write]:
        for id in sorted(self._pending):
            if self.is_durable(id):
                self._pending.discard(id)
                self._finish(id)
        writes = []
        for rank, one in self._ranks.items():
            if waiting := [id for id in self._pending if one.could_write(id)]:
                writes.append(Write(rank, min(waiting)))
        return writes

    def _choose(self) -> None:
        """Choose the next target: the newest demanded step, else the newest due one. Due steps that
        are older are skipped."""
        if not self._pending:
            return
        demanded = self._pending & self._demanded
        target = max(
            {id for id in demanded if self._sealed_by_all(id)} or demanded or self._pending
        )
        passed = {id for id in self._pending - self._demanded if id < target}
        self._pending -= {target, *passed}
        self._target = target
        self._skip(len(passed))

    def _yield_to_flush(self) -> None:
        """Give up a target that some rank has not sealed yet (or never will), if a demanded step
        that all ranks have sealed waits. So the target does not hold up a flush."""
        if self._target is None or self._sealed_by_all(self._target):
            return
        if any(self._sealed_by_all(id) for id in self._pending & self._demanded):
            if any(one.has_sealed(self._target) for one in self._ranks.values()):
                self._pending.add(self._target)
            self._target = None

    def _finish(self, id: StepId) -> None:
        self.counts.persisted += 1
        self.durable = id if self.durable is None else max(self.durable, id)
        self._demanded.discard(id)
        self._target = None
        self._adapt(id)

    def _adapt(self, id: StepId) -> None:
        """Coarsen the grid if steps were skipped or are too close. Refine it if writing would keep
        up with half the interval, too."""
        newest = max((one.passed for one in self._ranks.values() if one.passed), default=id)
        if not self._adaptive or newest.epoch != id.epoch:
            return
        if self._skipped_since_change or self.grid.newest_interval < self.least:
            self.grid = self.grid.coarsen(newest.step + 1)
            self._skipped_since_change = self._calm = 0
            return
        quick = 2 * (newest.step - id.step) < self.grid.interval(id.step)
        self._calm = self._calm + 1 if quick else 0
        if self._calm >= CALM_BEFORE_REFINING and self.grid.newest_interval > self.least:
            self.grid = self.grid.refine(newest.step + 1)
            self._calm = 0

    def _skip(self, count: int) -> None:
        self.counts.skipped += count
        self._skipped_since_change += count

    def _drop_impossible(self) -> None:
        lost = {id for id in self._pending if not self._possible(id)}
        self._pending -= lost
        self._demanded = {id for id in self._demanded if self._possible(id)}
        self._skip(len(lost))

    def _drop_target(self) -> None:
        if self._target is not None:
            self._demanded.discard(self._target)
        self._target = None

    def _fail(self, rank: int, id: StepId) -> None:
        """Stop offering the rank's image for writing. So the step becomes impossible."""
        one = self._ranks[rank]
        one.held.discard(id)
        one.failed = id
        self.counts.failed += 1

    def _sealed_by_all(self, id: StepId) -> bool:
        return all(one.has_sealed(id) for one in self._ranks.values())

    def _possible(self, id: StepId) -> bool:
        return all(one.can_have(id) for one in self._ranks.values())

    def _is_coming(self, id: StepId) -> bool:
        """Whether every rank has sealed this step or still may, and at least one has sealed it."""
        return any(one.has_sealed(id) for one in self._ranks.values()) and self._possible(id)

    def _is_new(self, id: StepId) -> bool:
        return id != self._target and not self.is_durable(id)
