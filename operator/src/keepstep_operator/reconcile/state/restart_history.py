"""Restarts of a run and what each of them cost: counted once, however often they are told.

Every rank tells of every restore since its sidecar started, with each report. One epoch is one
restart. It is accounted for when all ranks told of it, or when those who will not have had their
time. What was counted before the reconciler itself restarted is known from CheckpointRun.status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.steps import NEAREST_FIRST, Epoch, EpochId, Tier
from keepstep.wire.reports import Report, ReportedRestore

PATIENCE_S = 35.0
"""For ranks that did not tell of a restore yet: a sidecar that died forgets it, and one of a large
run may report every half minute only."""


MOST_WAITING = 1024
"""Epochs that are told of and not accounted for; what is told beyond that is not looked at."""
MOST_DONE = 4096
"""Epochs that are remembered as counted: the newest."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One life of the run that began after another. `parent` None: it began at step 0.

    `step`: where it went on. `tier`: the farthest that a rank needed, None if nobody said.
    `origin`: the other run that the step is of, where this run began as its fork.
    """

    epoch: EpochId
    parent: bool
    step: int
    tier: Tier | None
    seconds: float
    lost_steps: int
    at: float
    origin: str = ""


@dataclass(kw_only=True)
class _Told:
    """What was heard of one epoch. `before`: newest step that all had staged when it began.
    `ranks`: those that told, as bits; of them only what counts is kept, as a pod may tell of
    thousands with each report: the farthest `tier`, the most `seconds`, the least `lost` steps."""

    epoch: Epoch
    since: float
    before: int | None
    ranks: int = 0
    tier: Tier | None = None
    seconds: float = 0.0
    lost: int | None = None

    def add(self, one: ReportedRestore) -> None:
        """A rank tells; what it told before it may tell again."""
        self.ranks |= 1 << one.rank
        tiers = [tier for tier in (self.tier, one.tier) if tier is not None]
        self.tier = max(tiers, key=NEAREST_FIRST.index, default=None)
        self.seconds = max(self.seconds, one.seconds)
        self.lost = one.lost_steps if self.lost is None else min(self.lost, one.lost_steps)

    def as_restart(self, *, world: int | None, at: float) -> Restart:
        parent = self.epoch.parent
        step = parent.step if parent else 0
        lost = self.lost if self.ranks.bit_count() == world else None
        return Restart(
            epoch=self.epoch.id,
            parent=parent is not None,
            step=step,
            tier=self.tier,
            seconds=self.seconds,
            lost_steps=max(0, (self.before or step) - step, lost or 0),
            at=at,
            origin=self.epoch.origin,
        )


class RestartHistory:
    """Which restarts are known, and which of them were counted."""

    def __init__(self) -> None:
        self.restarts = 0
        self.lost_steps = 0
        self.counted: EpochId | None = None
        self._done: set[EpochId] = set()
        self._told: dict[EpochId, _Told] = {}

    def resume(self, *, restarts: int, lost_steps: int, counted: EpochId | None) -> None:
        """Go on from what an earlier reconciler wrote down."""
        self.restarts, self.lost_steps, self.counted = restarts, lost_steps, counted

    def take(
        self,
        report: Report,
        *,
        named: set[EpochId],
        current: EpochId | None,
        recorded: Mapping[EpochId, Epoch],
        before: int | None,
        at: float,
    ) -> None:
        """One report. `named`: the epochs that its sidecar has on record; `current`: the newest
        epoch now; `before`: the newest step that all ranks had staged before this report."""
        if current is not None and current in recorded:
            self._note(recorded[current], named, before, at)
        for one in report.restores:
            self._note(one.epoch, named, None, at)
            if one.epoch.id in self._told:
                self._told[one.epoch.id].add(one)

    def _note(self, epoch: Epoch, named: set[EpochId], before: int | None, at: float) -> None:
        if epoch.id in self._told or len(self._told) >= MOST_WAITING:
            return
        if not self._is_counted(epoch.id, named):
            self._told[epoch.id] = _Told(epoch=epoch, since=at, before=before)

    def _is_counted(self, id: EpochId, named: set[EpochId]) -> bool:
        """An older number than the counted one is news only to those who never saw that one:
        everything was gone, and the numbers began anew."""
        if id in self._done or id == self.counted:
            return True
        counted = self.counted
        return counted is not None and id.number < counted.number and counted in named

    def due(self, *, world: int | None, at: float) -> list[Restart]:
        """Restarts that are now accounted for, oldest first. Each is returned once."""
        ripe = [
            told
            for told in self._told.values()
            if (world is not None and told.ranks.bit_count() >= world)
            or at - told.since >= PATIENCE_S
        ]
        found = []
        for told in sorted(ripe, key=lambda one: one.epoch.id):
            del self._told[told.epoch.id]
            restart = self._account(told, told.as_restart(world=world, at=at))
            found += [restart] if restart else []
        return found

    def _account(self, told: _Told, restart: Restart) -> Restart | None:
        first = self.counted is None and not restart.parent and not told.before
        begins = self.counted is None and bool(restart.origin)
        self.counted = restart.epoch
        self._done.add(restart.epoch)
        if len(self._done) > MOST_DONE:
            self._done = set(sorted(self._done)[-MOST_DONE // 2 :])
        if first:
            return None
        self.restarts += not begins
        self.lost_steps += restart.lost_steps
        return restart

    @property
    def waiting(self) -> bool:
        """Something was told that is not accounted for yet."""
        return bool(self._told)
