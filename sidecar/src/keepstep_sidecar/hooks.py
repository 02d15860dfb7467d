"""What depots hear of this machine's volumes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from keepstep.steps import StepId
from keepstep_sidecar.depots import Depot, Keeper
from keepstep_sidecar.scan import Found


class Hooks:
    """Level-triggered: a commit is told once a life, and again when its shards are others."""

    def __init__(self, depots: Sequence[Depot]) -> None:
        self._depots = tuple(depots)
        self._told: dict[StepId, frozenset[int]] = {}

    def durable(self, found: Iterable[Found]) -> None:
        """These shards are on the volumes."""
        for one in found if self._depots else ():
            for depot in self._depots:
                depot.durable(one)

    def committed(self, id: StepId, shards: Mapping[int, Found]) -> None:
        """The step is committed; its files lie where they will stay."""
        if self._depots and self._told.get(id) != (ranks := frozenset(shards)):
            self._told[id] = ranks
            for depot in self._depots:
                depot.committed(id, dict(shards))

    def forget(self, ids: Collection[StepId]) -> None:
        """Dead, or deleted here."""
        for id in ids:
            self._told.pop(id, None)
        for depot in self._depots if ids else ():
            depot.forget(ids)

    def in_use(self, id: StepId) -> bool:
        """Some depot reads a shard of this step."""
        return any(depot.in_use(id) for depot in self._depots)

    async def make_room(self, size_bytes: int) -> bool:
        """Copies that are kept for others go first. False when there was nothing to let go."""
        keepers = [one for one in self._depots if isinstance(one, Keeper)]
        return any([await one.make_room(size_bytes) for one in keepers])
