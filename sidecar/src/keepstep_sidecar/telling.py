"""What the ledger is told: everything that slots, volumes and depots hold, rank by rank.

A rank that lost its last copy must be told of as empty: silence would leave the ledger with what it
heard before. So nobody is forgotten who was here once.
"""

from __future__ import annotations

from keepstep.ledger import Held, RankReport, Reported
from keepstep.steps import Answer, StepId, Tier
from keepstep_sidecar.bank import Bank
from keepstep_sidecar.remotes import Remotes
from keepstep_sidecar.slotkeeper import Slotkeeper
from keepstep_sidecar.stock import Stock


class Telling:
    """`silent`: what is on the volumes is not known, or not all of it."""

    def __init__(self, keeper: Slotkeeper, stock: Stock, remotes: Remotes) -> None:
        self.silent = True
        self._keeper = keeper
        self._stock = stock
        self._remotes = remotes
        self._ranks: set[int] = set()
        self._remote_ranks: set[int] = set()
        self._index_told = remotes.index

    # --- reports -----------------------------------------------------------------------------

    def here(self) -> Reported:
        """All that this machine holds, of every rank that is known here."""
        return Reported(ranks={rank: self.of_rank(rank) for rank in self.ranks()})

    def of_rank(self, rank: int) -> RankReport:
        """One rank, wherever it is held."""
        memory, local = self._memory(rank), self._stock.of_rank(rank)
        nothing = Answer.UNKNOWN if self.silent else Answer.NONE
        beyond = self._remotes.report(rank)
        return RankReport(
            sealed={Tier.MEMORY: memory, Tier.LOCAL: local, **beyond.sealed},
            answers={
                Tier.MEMORY: Answer.STEPS if memory else Answer.NONE,
                Tier.LOCAL: Answer.STEPS if local else nothing,
                **beyond.answers,
            },
        )

    def beyond(self) -> Reported:
        """What depots hold or held. Of ranks that are here it is told with everything else, too."""
        self._index_told = self._remotes.index
        self._remote_ranks.update(self._remotes.ranks)
        ranks = {rank: self._remotes.report(rank) for rank in self._remote_ranks}
        return Reported(ranks=ranks, epochs=self._remotes.epochs)

    @property
    def beyond_is_stale(self) -> bool:
        """Depots were looked at since `beyond` was told."""
        return self._index_told != self._remotes.index

    # --- ranks -------------------------------------------------------------------------------

    def ranks(self) -> list[int]:
        """Every rank of which something is or was here."""
        self._ranks.update(self._keeper.ranks, *self._stock.shards.values())
        return sorted(self._ranks)

    def world(self, rank: int) -> int:
        """The world size that the rank's trainer or its newest image names, 0 for none."""
        slots = self._keeper.ranks.get(rank)
        if slots is not None and slots.world:
            return slots.world
        return self._stock.world(rank)

    def newest_in_memory(self, rank: int, default: StepId) -> StepId:
        slots = self._keeper.ranks.get(rank)
        return max(slots.sealed() if slots is not None else (), default=default)

    def _memory(self, rank: int) -> tuple[Held, ...]:
        if (slots := self._keeper.ranks.get(rank)) is None:
            return ()
        return tuple(_in_slot(*at) for id in slots.sealed() if (at := slots.find(id)))


def _in_slot(bank: Bank, index: int) -> Held:
    id, layout = bank.table.slots[index].id, bank.layout
    assert id is not None
    return Held(id=id, world=layout.world, twins=layout.twins, bytes=layout.size_bytes)
