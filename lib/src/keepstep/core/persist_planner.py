"""Which staged images are written to the local volumes, and when.

A step is committed only when *every* rank wrote it, so the ranks of a node must not choose for
themselves. The planner has one step in flight, the *target*: a rank writes it when it has sealed
it. When the target is done, the next one is the newest due step that every rank still holds or
has not passed yet; the due steps before it are skipped, counted, and the grid is coarsened, so
that ranks of other nodes, which would skip others, meet again. It is never finer than `pace` says.
Nothing is queued in memory.

With two slots per rank (`SlotTable` then waits for the writer) every due image is written, in
order, each rank at its own pace.

While nothing that was sealed waits, the next due image may be written while it is still copied: a
head start, given up (`wants`) as soon as the image cannot be sealed or a sealed one waits.

A rank writes one image at a time: at most one slot of a rank is pinned by persisting. The host
pins the slot of a `Write` before it does anything else, and reports the end with `written`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from keepstep.core.schedule import Grid
from keepstep.steps import StepId

CALM_BEFORE_REFINING = 4
"""Targets in a row that took less than half an interval, before the grid is refined."""

_DONE_KEPT = 64


@dataclass(frozen=True)
class Write:
    """Pin the slot of `rank` that holds `id` and persist it; then call `written`. An image that is
    still copied has no seal yet: the file gets its name only once it has."""

    rank: int
    id: StepId


@dataclass
class PersistCounts:
    """Steps since the start. `skipped`: due, but the writer was busy until it was too late.
    `abandoned`: chosen, but some rank passed it or died. `failed`: a rank could not write it."""

    persisted: int = 0
    skipped: int = 0
    abandoned: int = 0
    failed: int = 0


@dataclass
class _Rank:
    """What the planner knows of one rank. `passed`: the newest step it sealed; `filling`: the one
    that is copied now; `early`: written before it was sealed; `failed`: could not be written."""

    filling: StepId | None = None
    early: StepId | None = None
    failed: StepId | None = None
    held: set[StepId] = field(default_factory=set)
    done: set[StepId] = field(default_factory=set)
    writing: StepId | None = None
    passed: StepId | None = None
    gone: bool = False

    def can_have(self, id: StepId) -> bool:
        """It has sealed this step, or may still come to."""
        return self.has_sealed(id) or self.may_seal(id)

    @property
    def busy(self) -> bool:
        return self.writing is not None or self.early is not None

    def lacks(self, id: StepId) -> bool:
        """It could write this step now, and has not."""
        return (id in self.held or id == self.filling) and id not in self.done

    def has_sealed(self, id: StepId) -> bool:
        """It holds the image, wrote it, or is writing it."""
        return id in self.held or id in self.done or id == self.writing

    def may_seal(self, id: StepId) -> bool:
        """A trainer that died comes back in another epoch, and seals nothing more of this one."""
        if self.passed is None:
            return not self.gone
        return self.passed < id and not (self.gone and self.passed.epoch == id.epoch)


class PersistPlanner:
    """Decides the writes of one node: events in, `Write`s out. `ranks`: those of this node.

    Every event may be reported twice, and returns the writes to start now. Those of other ranks
    change nothing.
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
        """The step in flight, if any (never with two slots)."""
        return self._target

    @property
    def idle(self) -> bool:
        """Nothing is being written, and nothing that is held waits to be."""
        busy = any(one.busy for one in self._ranks.values())
        return not busy and self._target is None and not self._pending

    # --- events --------------------------------------------------------------------------

    def copied(self, rank: int, id: StepId) -> tuple[Write, ...]:
        """A part of this step's image lies in a slot of the rank, and will not change."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.gone = False
        one.filling = None if id in (one.failed, one.passed) else id
        return self._advance()

    def sealed(self, rank: int, id: StepId) -> tuple[Write, ...]:
        """The image of this step is complete in a slot of the rank."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.gone, one.filling = False, None
        if one.early == id:
            one.writing, one.early = id, None
        if one.failed != id:
            one.held.add(id)
        one.passed = id if one.passed is None else max(one.passed, id)
        if (self.grid.due(id.step) or id in self._demanded) and self._is_new(id):
            self._pending.add(id)
        return self._advance()

    def overwritten(self, rank: int, id: StepId) -> tuple[Write, ...]:
        """The slot that held this step was assigned anew, or its copy ended without a seal."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.held.discard(id)
        one.filling = None if one.filling == id else one.filling
        return self._advance()

    def written(self, rank: int, id: StepId, *, ok: bool = True) -> tuple[Write, ...]:
        """A `Write` ended, or a shard was found on disk. Not `ok`: failed, and not tried again."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        self._ended(one, id)
        if ok:
            one.done = set(sorted(one.done | {id})[-_DONE_KEPT:])
        else:
            self._fail(rank, id)
        return self._advance()

    def stopped(self, rank: int, id: StepId) -> tuple[Write, ...]:
        """A `Write` was ended because it was not wanted any more; it may be wanted again."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        self._ended(one, id)
        return self._advance()

    def removed(self, rank: int, id: StepId) -> None:
        """The rank's shard of this step is on no volume any more: it may be written again."""
        if (one := self._ranks.get(rank)) is not None:
            one.done.discard(id)

    def gone(self, rank: int) -> tuple[Write, ...]:
        """The trainer died: it will seal nothing more of this epoch. What it sealed stays."""
        if (one := self._ranks.get(rank)) is None:
            return ()
        one.gone, one.filling = True, None
        return self._advance()

    def forget(self, dead: Callable[[StepId], bool]) -> tuple[Write, ...]:
        """These steps are dead, because a new epoch began: nobody needs them on disk."""
        for one in self._ranks.values():
            one.held = {id for id in one.held if not dead(id)}
            one.done = {id for id in one.done if not dead(id)}
            one.filling = None if one.filling is None or dead(one.filling) else one.filling
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
        """Persist these steps, or the `newest` ones that all ranks hold, whatever the grid says.

        With a deadline near, the newest step counts most: it is written first.
        """
        for id in self.common()[-newest:] if ids is None else ids:
            if self._is_new(id):
                self._demanded.add(id)
                if any(id in one.held for one in self._ranks.values()):
                    self._pending.add(id)
        return self._advance()

    def pace(self, least: int) -> None:
        """Two due steps are to be so many steps apart at least, reached one doubling (or halving)
        with each finished step: a change holds from a step ahead of every rank."""
        self.least = least

    # --- asking --------------------------------------------------------------------------

    def common(self) -> list[StepId]:
        """Steps that every rank of this node holds in memory or has written, oldest first."""
        each = [one.held | one.done for one in self._ranks.values()]
        return sorted(set.intersection(*each)) if each else []

    def wants(self, rank: int, id: StepId) -> bool:
        """Whether a write that began before its image was sealed is to go on."""
        one = self._ranks.get(rank)
        if one is None or id != one.filling:
            return False
        return not self._waiting(one) if self._every else id == self._target

    def is_durable(self, id: StepId) -> bool:
        """Every rank of this node wrote it (since this planner began)."""
        return bool(self._ranks) and all(id in one.done for one in self._ranks.values())

    # --- deciding ------------------------------------------------------------------------

    def _advance(self) -> tuple[Write, ...]:
        self._drop_impossible()
        writes = self._each_at_its_pace() if self._every else self._one_in_flight()
        for write in writes:
            one = self._ranks[write.rank]
            if write.id in one.held:
                one.writing = write.id
            else:
                one.early = write.id
        return tuple(writes)

    def _ended(self, one: _Rank, id: StepId) -> None:
        one.writing = None if one.writing == id else one.writing
        one.early = None if one.early == id else one.early

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
            if self._target is not None and not one.busy and one.lacks(self._target)
        ]

    def _each_at_its_pace(self) -> list[Write]:
        for id in sorted(self._pending):
            if self.is_durable(id):
                self._pending.discard(id)
                self._finish(id)
        writes = []
        for rank, one in self._ranks.items():
            ahead = [] if one.filling is None or not self._is_due(one.filling) else [one.filling]
            waiting = self._waiting(one) or ahead
            if waiting and not one.busy:
                writes.append(Write(rank, min(waiting)))
        return writes

    def _choose(self) -> None:
        """The newest demanded step, else the newest due one; what is older was skipped. Only with
        nothing sealed, one that is still copied."""
        if not self._pending:
            copied = {one.filling for one in self._ranks.values() if one.filling is not None}
            self._target = max(filter(self._is_due, copied), default=None)
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
        """A target that some rank has yet to seal (or never will) does not hold up a flush."""
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
        """Coarsen when steps were skipped, or are too close; refine when half the interval would do
        as well."""
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
        """The rank's image is no longer offered for writing, so the step becomes impossible."""
        one = self._ranks[rank]
        one.held.discard(id)
        one.failed, one.filling = id, None if one.filling == id else one.filling
        self.counts.failed += 1

    def _sealed_by_all(self, id: StepId) -> bool:
        return all(one.has_sealed(id) for one in self._ranks.values())

    def _possible(self, id: StepId) -> bool:
        return all(one.can_have(id) for one in self._ranks.values())

    def _is_coming(self, id: StepId) -> bool:
        """All ranks may have it, and one has or is at it."""
        at_it = any(one.has_sealed(id) or one.filling == id for one in self._ranks.values())
        return at_it and self._possible(id)

    def _is_due(self, id: StepId) -> bool:
        return self.grid.due(id.step) and self._is_new(id) and self._possible(id)

    def _waiting(self, one: _Rank) -> list[StepId]:
        """Sealed images of the rank that wait to be written."""
        return [id for id in self._pending if id in one.held and id not in one.done]

    def _is_new(self, id: StepId) -> bool:
        return id != self._target and not self.is_durable(id)
