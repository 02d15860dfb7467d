"""Which committed steps are still to be sent, and in which order. Pure: times are passed in.

Every sidecar sends its own ranks' shards of the *same* steps, without asking the others: multiples
of a base, oldest first. An archive that is slower than the run loses steps: they are retired here
before their turn. Each sidecar might then catch other ones, and no step would ever be whole. So
whoever loses one sends multiples of twice the base from then on (and of the former base again,
once nothing waits): of two sidecars, the one with the finer grid sends all that the other does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from keepstep.steps import StepId
from keepstep_sidecar.volume.scan import LocalShard

_COARSEST = 20


@dataclass
class Backlog:
    """`base`: steps. `wanted`: sent although they are not multiples of it."""

    base: int
    doublings: int = 0
    wanted: set[StepId] = field(default_factory=set)
    _held: dict[StepId, Mapping[int, LocalShard]] = field(default_factory=dict)
    _since: dict[StepId, float] = field(default_factory=dict)
    _done: set[StepId] = field(default_factory=set)

    def committed(self, id: StepId, shards: Mapping[int, LocalShard], *, now: float) -> None:
        """A committed step and its shards that are here. Idempotent."""
        self._held[id] = shards
        self._since.setdefault(id, now)

    def sent(self, id: StepId) -> None:
        """All that this sidecar has of the step is in the archive, or must not go there."""
        self._done.add(id)
        if self.doublings and not self.waiting():
            self.doublings -= 1

    def forget(self, ids: Collection[StepId], *, blame_pace: bool) -> None:
        """These steps are gone. `blame_pace`: the archive works, so it was too slow for them."""
        lost = [id for id in ids if self._waits(id)]
        if lost and blame_pace:
            self.doublings = min(self.doublings + 1, _COARSEST)
        for id in ids:
            self._held.pop(id, None)
            self._since.pop(id, None)
            self._done.discard(id)
            self.wanted.discard(id)

    def waiting(self) -> list[StepId]:
        """Steps to be sent, in that order."""
        return sorted(filter(self._waits, self._held))

    def next(self) -> StepId | None:
        """The first of them."""
        return min(filter(self._waits, self._held), default=None)

    def shards(self, id: StepId) -> tuple[LocalShard, ...]:
        """What is here of a step, in the order of ranks."""
        held = self._held.get(id, {})
        return tuple(held[rank] for rank in sorted(held))

    def backlog(self) -> int:
        """Shards that wait."""
        return sum(len(self._held[id]) for id in self.waiting())

    def behind_s(self, now: float) -> float:
        """For how long the oldest of them waits."""
        return max((now - self._since[id] for id in self.waiting()), default=0.0)

    def holds(self, ids: Iterable[StepId]) -> bool:
        return any(id in self._held for id in ids)

    def _waits(self, id: StepId) -> bool:
        if id not in self._held or id in self._done:
            return False
        return id in self.wanted or id.step % (self.base << self.doublings) == 0
