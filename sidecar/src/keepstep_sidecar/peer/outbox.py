"""What of this machine's shards a buddy should hold, and in which order it gets them. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from keepstep.steps import StepId
from keepstep_sidecar.peer.ring import better
from keepstep_sidecar.peer.wire import Wanted
from keepstep_sidecar.scan import Found

Key = tuple[StepId, int]


@dataclass(kw_only=True)
class Outbox:
    """Durable shards of this machine. `committed`: the newest commit that it knows of."""

    clock: Callable[[], float] = time.monotonic
    found: dict[Key, Found] = field(default_factory=dict)
    committed: StepId | None = None
    _since: dict[Key, float] = field(default_factory=dict)

    def add(self, shards: Iterable[Found]) -> None:
        """They are durable here."""
        for one in shards:
            self.found[one.id, one.rank] = one
            self._since.setdefault((one.id, one.rank), self.clock())

    def commit(self, id: StepId) -> None:
        """This step is committed."""
        self.committed = id if self.committed is None else max(self.committed, id)

    def forget(self, ids: Collection[StepId]) -> None:
        """They are gone, or dead."""
        if self.committed in ids:  # by a rollback: which step is the newest commit now is not known
            self.committed = None
        for key in [key for key in self.found if key[0] in ids]:
            del self.found[key], self._since[key]

    def wanted(self) -> Wanted:
        """What buddies should keep: all that is here, back to the newest commit."""
        ranks: dict[int, tuple[StepId, ...]] = {}
        for id, rank in sorted(self.found):
            if self.committed is None or id >= self.committed:
                ranks[rank] = (*ranks.get(rank, ()), id)
        return Wanted(committed=self.committed, ranks=ranks)

    def due(self, there: Collection[Key]) -> list[Found]:
        """What a buddy lacks, most urgent first: the newest commit, then later steps, oldest
        first."""
        keys = sorted(key for key in self.found if key not in there)
        return [self.found[k] for k in keys if self.committed is None or k[0] >= self.committed]

    def of(self, id: StepId, there: Collection[Key]) -> list[Found]:
        """This step's shards that a buddy lacks."""
        return [self.found[key] for key in sorted(self.found) if key[0] == id and key not in there]

    def best(self, after: StepId | None) -> StepId | None:
        """The step to send next when not all can be: see `ring.better`. Committed ones only, where
        commits are known."""
        best: StepId | None = None
        for id in {id for id, _ in self.found}:
            known = self.committed is None or id <= self.committed
            if known and (after is None or id > after):
                best = better(id, best)
        return best

    def waiting_s(self, there: Collection[Key]) -> float:
        """For how long the oldest shard that is due waits."""
        since = (self._since[one.id, one.rank] for one in self.due(there))
        return self.clock() - min(since, default=self.clock())
