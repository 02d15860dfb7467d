"""Restarts of a run and what each of them cost. Each is counted once, however often it is reported.

With each report, every rank lists all restores since its sidecar started. One epoch is one restart.
It is accounted for once all ranks have reported it, or once the ranks that will not report it have
had their time. What an earlier leader counted is known from
`keepstep.wire.run_reports.LeaderRecord`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.steps import NEAREST_FIRST, Epoch, EpochId, Tier
from keepstep.wire.member_reports import Report, ReportedRestore

PATIENCE_S = 35.0
"""How long to wait for ranks that have not reported a restore: a sidecar that died forgets the
restore, and a sidecar of a large run may report only every half minute."""


@dataclass(frozen=True, kw_only=True)
class RunRestart:
    """One epoch of the run that began after another. `parent` False: it began at step 0.

    `step`: where it went on. `tier`: the farthest tier that a rank needed; None if no rank named
    one. `origin`: if this run began as a fork, the other run that the step belongs to.
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
class _Known:
    """What was reported of one epoch. `before`: the newest step that all ranks had staged when it
    began. `ranks`: the ranks that reported it, as bits.

    A pod may report thousands of ranks each time. So of all ranks together only what counts is
    kept: the farthest `tier`, the most `seconds`, the fewest `lost` steps.
    """

    epoch: Epoch
    since: float
    before: int | None
    ranks: int = 0
    tier: Tier | None = None
    seconds: float = 0.0
    lost: int | None = None

    def add(self, restore: ReportedRestore) -> None:
        """Add a rank's report. The same report may come again."""
        self.ranks |= 1 << restore.rank
        tiers = [tier for tier in (self.tier, restore.tier) if tier is not None]
        self.tier = max(tiers, key=NEAREST_FIRST.index, default=None)
        self.seconds = max(self.seconds, restore.seconds)
        self.lost = restore.lost_steps if self.lost is None else min(self.lost, restore.lost_steps)

    def as_restart(self, *, world: int | None, at: float) -> RunRestart:
        parent = self.epoch.parent
        step = parent.step if parent else 0
        lost = self.lost if self.ranks.bit_count() == world else None
        return RunRestart(
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
    """The known restarts, and which of them were counted."""

    def __init__(self) -> None:
        self.restarts = 0
        self.lost_steps = 0
        self.counted: EpochId | None = None
        self._done: set[EpochId] = set()
        self._known: dict[EpochId, _Known] = {}

    def resume(self, *, restarts: int, lost_steps: int, counted: EpochId | None) -> None:
        """Go on from what an earlier leader counted, which members have reported again."""
        self.restarts, self.lost_steps, self.counted = restarts, lost_steps, counted
        after = counted.number if counted is not None else -1
        self._known = {
            epoch_id: known for epoch_id, known in self._known.items() if epoch_id.number > after
        }

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
        """Take in one report. `named`: the epochs that its sidecar has on record. `current`: the
        newest epoch now. `before`: the newest step that all ranks had staged before this report."""
        if current is not None and current in recorded:
            self._note(recorded[current], named, before, at)
        for restore in report.restores:
            self._note(restore.epoch, named, None, at)
            if restore.epoch.id in self._known:
                self._known[restore.epoch.id].add(restore)

    def _note(self, epoch: Epoch, named: set[EpochId], before: int | None, at: float) -> None:
        if epoch.id not in self._known and not self._is_counted(epoch.id, named):
            self._known[epoch.id] = _Known(epoch=epoch, since=at, before=before)

    def _is_counted(self, epoch_id: EpochId, named: set[EpochId]) -> bool:
        """Whether this epoch is counted already. An epoch with a lower number than the counted one
        is new only if its sidecar has no record of the counted one: then all records were lost, and
        the numbers began anew."""
        if epoch_id in self._done or epoch_id == self.counted:
            return True
        counted = self.counted
        return counted is not None and epoch_id.number < counted.number and counted in named

    def take_countable_restarts(self, *, world: int | None, at: float) -> list[RunRestart]:
        """The restarts that are accounted for now, oldest first. Each is returned once."""
        ripe = [
            known
            for known in self._known.values()
            if (world is not None and known.ranks.bit_count() >= world)
            or at - known.since >= PATIENCE_S
        ]
        found = []
        for known in sorted(ripe, key=lambda restart: restart.epoch.id):
            del self._known[known.epoch.id]
            restart = self._account(known, known.as_restart(world=world, at=at))
            found += [restart] if restart else []
        return found

    def _account(self, known: _Known, restart: RunRestart) -> RunRestart | None:
        first = self.counted is None and not restart.parent and not known.before
        begins = self.counted is None and bool(restart.origin)
        self.counted = restart.epoch
        self._done.add(restart.epoch)
        if first:
            return None
        self.restarts += not begins
        self.lost_steps += restart.lost_steps
        return restart
