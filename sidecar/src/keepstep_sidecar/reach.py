"""Which image can be had from where: slots, volumes, depots. Asks nobody, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep.ledger import NEAREST_FIRST
from keepstep.protocol import Offer
from keepstep.steps import StepId, Tier
from keepstep_sidecar.origins import LocalOrigin, LocalReader, Origin
from keepstep_sidecar.remotes import Remotes
from keepstep_sidecar.scan import Found
from keepstep_sidecar.slotkeeper import Slotkeeper

Shards = Mapping[StepId, Mapping[int, Found]]
"""step -> rank -> the shard on a volume of this machine."""


class Reach:
    """Of one sidecar. `shards` is the catalog's own, as it is at any moment."""

    def __init__(
        self, shards: Shards, keeper: Slotkeeper, remotes: Remotes, reader: LocalReader
    ) -> None:
        self._shards = shards
        self._keeper = keeper
        self._remotes = remotes
        self._reader = reader

    def origins(self, id: StepId, rank: int) -> list[Origin]:
        """Where the saved rank's shard lies beyond memory, nearest first."""
        local = self._shards.get(id, {}).get(rank)
        here: list[Origin] = []
        if local is not None:
            here.append(LocalOrigin(found=local, reader=self._reader))
        return [*here, *self._remotes.of(id).get(rank, ())]

    def nearest(self, id: StepId, rank: int) -> Tier | None:
        """The nearest tier that holds the image."""
        slots = self._keeper.ranks.get(rank)
        if slots is not None and slots.find(id) is not None:
            return Tier.MEMORY
        origins = self.origins(id, rank)
        return origins[0].tier if origins else None

    def ranks_with(self, id: StepId) -> list[int]:
        """Saved ranks of which a shard lies somewhere beyond memory."""
        return sorted({*self._shards.get(id, {}), *self._remotes.of(id)})

    def ids(self) -> set[StepId]:
        """Every step of which something is within reach."""
        sealed = (id for slots in self._keeper.ranks.values() for id in slots.sealed())
        return {*self._shards, *self._remotes.ids, *sealed}

    def world_of(self, id: StepId) -> int | None:
        """How many ranks saved the step; None when nobody knows, or copies disagree."""
        worlds = {found.world for found in self._shards.get(id, {}).values()}
        worlds |= {each[0].world for each in self._remotes.of(id).values()}
        worlds |= {
            at[0].layout.world for one in self._keeper.ranks.values() if (at := one.find(id))
        }
        return worlds.pop() if len(worlds) == 1 else None

    def offers(self, whole: Iterable[StepId]) -> tuple[Offer, ...]:
        """Of the steps that the ledger calls whole, those of which every byte of every rank is
        within reach, oldest first.

        A rank whose own image is gone is covered by a twin: its image has the very same boxes.
        """
        found = [self._offer(id) for id in sorted(self.ids().intersection(whole))]
        return tuple(one for one in found if one is not None)

    def _offer(self, id: StepId) -> Offer | None:
        if (world := self.world_of(id)) is None:
            return None
        nearest: dict[int, Tier] = {}
        for tier, rank, twins in self._copies(id):
            for covered in (rank, *twins):
                nearest[covered] = min(nearest.get(covered, tier), tier, key=NEAREST_FIRST.index)
        if not set(range(world)).issubset(nearest):
            return None
        farthest = max((nearest[rank] for rank in range(world)), key=NEAREST_FIRST.index)
        return Offer(id=id, tier=farthest, world=world)

    def _copies(self, id: StepId) -> Iterable[tuple[Tier, int, tuple[int, ...]]]:
        """(tier, rank, twins) of all copies."""
        for rank, slots in self._keeper.ranks.items():
            if (at := slots.find(id)) is not None:
                yield at[0].tier(at[1]), rank, at[0].layout.twins
        for rank, found in self._shards.get(id, {}).items():
            yield Tier.LOCAL, rank, found.layout.twins
        for rank, places in self._remotes.of(id).items():
            yield places[0].tier, rank, places[0].twins
