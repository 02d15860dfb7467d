"""Which committed steps are still to be sent, and in which order. Pure: times are passed in.

Every sidecar sends its own ranks' shards of the *same* steps without asking the others: multiples
of a base, oldest first. If an archive is slower than the run, steps are lost: they are retired here
before their turn. Each sidecar might then send different steps, and no step would ever be whole. So
a sidecar that loses a step sends only multiples of twice the base from then on (and of the former
base again once nothing waits). Of two sidecars, the one with the finer grid sends all steps that
the other sends.

A due step that some rank left out is never committed. The first commit after it takes its place.
The operator, or the only sidecar, says so, because it sees all ranks (`stand_in`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.core.schedule import stands_in
from keepstep.steps import StepId
from keepstep_sidecar.volume.scan import LocalShard

_COARSEST = 20


@dataclass
class Backlog:
    """`base`: a number of steps. `wanted`: steps to be sent that are not multiples of it."""

    base: int
    doublings: int = 0
    wanted: set[StepId] = field(default_factory=set)
    _newest: StepId | None = None
    _held: dict[StepId, Mapping[int, LocalShard]] = field(default_factory=dict)
    _since: dict[StepId, float] = field(default_factory=dict)
    _done: set[StepId] = field(default_factory=set)

    def compare(
        self,
        held: Mapping[StepId, Mapping[int, LocalShard]],
        done: Collection[StepId] = (),
        *,
        now: float,
        blame_pace: bool = False,
    ) -> None:
        """Take over what is here. `held`: all steps of which shards are here and whose fate is
        known. `done`: those of which nothing is to be sent. `blame_pace`: the archive works, so if
        a step is gone that was waiting, the archive was too slow."""
        gone = self._held.keys() - held.keys()
        if blame_pace and any(map(self._waits, gone)):
            self.doublings = min(self.doublings + 1, _COARSEST)
        self.wanted -= gone
        self._held, self._done = dict(held), set(done)
        self._since = {id: self._since.get(id, now) for id in held}

    def stand_in(self, commits: Collection[StepId]) -> None:
        """Let the newest of all commits replace a due step before it that was never committed."""
        before, self._newest = self._newest, max(commits, default=None)
        new = self._newest
        if before is None or new is None or before.epoch != new.epoch:
            return
        steps = {id.step for id in commits if id.epoch == new.epoch}
        if stands_in(new.step, before=before.step, commits=steps, every=self.base):
            self.wanted.add(new)

    def sent(self, id: StepId) -> None:
        """Nothing of this step is to be sent any more."""
        self._done.add(id)
        if self.doublings and not self.waiting():
            self.doublings -= 1

    def waiting(self) -> list[StepId]:
        """The steps to be sent, in this order."""
        return sorted(filter(self._waits, self._held))

    def next(self) -> StepId | None:
        """The first step to be sent; None if there is none."""
        return min(filter(self._waits, self._held), default=None)

    def shards(self, id: StepId) -> tuple[LocalShard, ...]:
        """The shards of a step that are here, in the order of ranks."""
        held = self._held.get(id, {})
        return tuple(held[rank] for rank in sorted(held))

    def backlog(self) -> int:
        """How many shards wait."""
        return sum(len(self._held[id]) for id in self.waiting())

    def behind_s(self, now: float) -> float:
        """For how many seconds the oldest waiting step has been waiting."""
        return max((now - self._since[id] for id in self.waiting()), default=0.0)

    def _waits(self, id: StepId) -> bool:
        return id in self._held and id not in self._done and self.due(id)

    def due(self, id: StepId) -> bool:
        """Whether the step belongs into the archive."""
        return id in self.wanted or id.step % (self.base << self.doublings) == 0
