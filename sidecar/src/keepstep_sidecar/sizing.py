"""How many slots a bank gets: memory limit and tmpfs, divided among this machine's ranks."""

from __future__ import annotations

from keepstep_sidecar.bank import Bank
from keepstep_sidecar.budget import LEAST_SLOTS, Budget, shortage
from keepstep_sidecar.config import Config
from keepstep_sidecar.journal import warn
from keepstep_sidecar.leases import Lease
from keepstep_sidecar.memory import free_bytes
from keepstep_sidecar.slotkeeper import RankSlots, Slotkeeper


class Sizing:
    """Decides `Bank.wanted`, at the cost of older layouts' slots if need be."""

    def __init__(self, config: Config, keeper: Slotkeeper) -> None:
        self._config = config
        self._keeper = keeper

    def fit(self, slots: RankSlots, bank: Bank, lease: Lease) -> str:
        """Set the number of slots; returns the warning when they are fewer than asked for.

        Raises NoMemoryError when not even two fit.
        """
        budget, size_bytes, wanted = self._budget(lease), bank.layout.size_bytes, self._config.slots
        others = [one for one in slots.banks.values() if one is not bank]
        count = self._affordable(budget, size_bytes, others)
        for keep, enough in ((2, wanted), (1, LEAST_SLOTS)):
            if count >= enough:
                continue
            for other in others:
                self._keeper.unlink(other.give_up(keep=keep))
            count = self._affordable(budget, size_bytes, others)
        warning = shortage(budget, size_bytes, wanted=wanted, count=count)
        bank.failure = ""
        bank.wanted = max(count, bank.count)
        if warning:
            warn("fewer slots", rank=slots.rank, slots=count, reason=warning)
        return warning

    def most(self, slots: RankSlots, bank: Bank, lease: Lease | None) -> int:
        """Slots that this bank may grow to for a restore: one beyond the usual, if it fits."""
        if lease is None:  # whoever comes, or nobody: room for one image is enough to know
            others = self._keeper.made_bytes - sum(len(file.view) for _, file in bank.present())
            return Budget(total_bytes=self._total_bytes(), ranks=1).affordable(
                bank.layout.size_bytes, wanted=self._config.slots, taken_bytes=others
            )
        taken = slots.taken_bytes - bank.size_bytes
        return self._budget(lease).affordable(
            bank.layout.size_bytes, wanted=self._config.slots + 1, taken_bytes=taken
        )

    def _affordable(self, budget: Budget, size_bytes: int, others: list[Bank]) -> int:
        taken = sum(other.size_bytes for other in others)
        return budget.affordable(size_bytes, wanted=self._config.slots, taken_bytes=taken)

    def _budget(self, lease: Lease) -> Budget:
        gone = self._keeper.gone_bytes(lease.world)
        return Budget(
            total_bytes=max(0, self._total_bytes() - gone),
            ranks=lease.request.local_world or lease.world,
        )

    def _total_bytes(self) -> int:
        there = free_bytes(self._config.memory_dir) + self._keeper.made_bytes
        limit = self._config.memory_limit_bytes
        return there if limit is None else min(limit, there)
