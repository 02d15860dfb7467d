"""How many slots a rank may have within the memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.errors import NoMemoryError
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.errors import refuse
from keepstep_sidecar.leases import Lease, Leases
from keepstep_sidecar.log import warn
from keepstep_sidecar.memory.allocator import Allocator
from keepstep_sidecar.memory.slot_pool import RankSlots, SlotPool, SlotSet

LEAST_SLOTS = 2
_KEPT_OF_GONE = 2
"""Images of a rank that trains here no more, until the run has restored: of its newest two steps,
one is common to all ranks."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory for slots. `total_bytes`: for all `ranks` ranks of this machine together."""

    total_bytes: int
    ranks: int

    @property
    def share_bytes(self) -> int:
        """A rank's share. It is fixed, so that the first rank leaves room for the last."""
        return self.total_bytes // max(1, self.ranks)

    def affordable(self, slot_bytes: int, *, wanted: int, taken_bytes: int = 0) -> int:
        """How many slots of this size, up to `wanted`, fit beside the rank's `taken_bytes`."""
        return max(0, min(wanted, (self.share_bytes - taken_bytes) // slot_bytes))


def shortage(budget: Budget, slot_bytes: int, *, wanted: int, count: int) -> str:
    """The warning about fewer slots than wanted; "" when there are enough.

    Raises NoMemoryError when even two do not fit.
    """
    asked = (
        f"{wanted} slots of {slot_bytes} bytes for each of {budget.ranks} ranks need"
        f" {wanted * slot_bytes * budget.ranks} bytes, but there are {budget.total_bytes}"
    )
    if count < LEAST_SLOTS:
        raise NoMemoryError(
            f"{asked}: not even {LEAST_SLOTS} fit; raise --memory-limit or give the machine more"
            " shared memory",
            code="no-memory",
        )
    if count >= wanted:
        return ""
    risk = (
        "every staged step waits to be persisted"
        if count == LEAST_SLOTS
        else ("after a crash, ranks may have no step in common in memory")
    )
    return f"{asked}: {count} slots instead, so {risk}; raise --memory-limit"


# --- how many slots --------------------------------------------------------------------------
#
# How many slots a slot set gets: memory limit and tmpfs space are divided among this machine's
# ranks.


class Sizing:
    """Decides `SlotSet.wanted`. If need be, slots of older layouts are given up for it."""

    def __init__(
        self, config: Config, pool: SlotPool, *, allocator: Allocator, leases: Leases
    ) -> None:
        self._config = config
        self._pool = pool
        self._allocator = allocator
        self._leases = leases

    def fit(self, slots: RankSlots, slot_set: SlotSet, lease: Lease) -> str:
        """Set the number of slots; fewer than configured as long as images of ranks that are gone
        take the memory. Returns a warning when there are fewer than configured, else "".

        Raises NoMemoryError when not even two fit; SidecarError `memory-busy` when they will, once
        images of former layouts are on the drive.
        """
        size_bytes, wanted = slot_set.layout.size_bytes, self._config.slots
        others = [one for one in slots.slot_sets.values() if one is not slot_set]
        # once: slots that are given up below have no names any more, but still take their memory
        total_bytes = self._total_bytes(size_bytes)

        def affordable(beside: list[SlotSet]) -> int:
            taken = sum(other.size_bytes for other in beside)
            budget = self._budget(lease, total_bytes)
            return budget.affordable(size_bytes, wanted=wanted, taken_bytes=taken)

        count = affordable(others)
        newest = max(slots.sealed(), default=None)
        for keep, enough in ((2, wanted), (1, LEAST_SLOTS), (0, LEAST_SLOTS)):
            if count >= enough:
                continue
            for other in others:
                if keep or newest not in other.table.sealed():
                    self._pool.unlink(other.give_up(keep=keep))
            if lease.training or keep == _KEPT_OF_GONE:
                self._give_up_gone(lease, keep=keep)
            count = affordable(others)
        if count < LEAST_SLOTS <= affordable([]):
            raise refuse("memory-busy", "images of a former layout are on their way to the drive")
        budget = self._budget(lease, total_bytes)
        warning = shortage(budget, size_bytes, wanted=wanted, count=count)
        slot_set.failure = ""
        slot_set.wanted = max(count, slot_set.count)
        if warning:
            warn("fewer slots", rank=slots.rank, slots=count, reason=warning)
        return warning

    def grow(self, slots: RankSlots, slot_set: SlotSet) -> None:
        """Order one more slot to restore into, unless one is already on its way or none fits."""
        most = self._most(slots, slot_set, self._leases.of(slots.rank))
        self._allocator.grow(slot_set, most=most)

    def _most(self, slots: RankSlots, slot_set: SlotSet, lease: Lease | None) -> int:
        """How many slots this set may have for a restore: one more than usual, if it fits."""
        if lease is None:  # it is unknown which trainers come, if any: only see whether images fit
            others = self._pool.made_bytes - sum(len(file.view) for _, file in slot_set.present())
            size_bytes = slot_set.layout.size_bytes
            return Budget(total_bytes=self._total_bytes(size_bytes), ranks=1).affordable(
                size_bytes, wanted=self._config.slots, taken_bytes=others
            )
        taken = slots.taken_bytes - slot_set.size_bytes
        size_bytes, wanted = slot_set.layout.size_bytes, self._config.slots + 1

        total_bytes = self._total_bytes(size_bytes)

        def affordable() -> int:
            budget = self._budget(lease, total_bytes)
            return budget.affordable(size_bytes, wanted=wanted, taken_bytes=taken)

        if not affordable():
            self._give_up_gone(lease, keep=_KEPT_OF_GONE)
        return affordable()

    def _give_up_gone(self, lease: Lease, *, keep: int) -> None:
        """Free slots of ranks that train here no more, without the newest `keep` images of each."""
        for slot_set in self._pool.gone_sets(lease.world):
            self._pool.unlink(slot_set.give_up(keep=keep))

    def _budget(self, lease: Lease, total_bytes: int) -> Budget:
        gone = self._pool.gone_bytes(lease.world)
        return Budget(
            total_bytes=max(0, total_bytes - gone),
            ranks=lease.request.local_world or lease.world,
        )

    def _total_bytes(self, slot_bytes: int) -> int:
        there = self._pool.directories.free_bytes(slot_bytes) + self._pool.made_bytes
        limit = self._config.memory_limit_bytes
        return there if limit is None else min(limit, there)
