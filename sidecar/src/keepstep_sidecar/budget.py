"""How many slots a rank may have. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.errors import NoMemoryError

LEAST_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class Budget:
    """`total_bytes`: for all ranks of this machine, of which there are `ranks`."""

    total_bytes: int
    ranks: int

    @property
    def share_bytes(self) -> int:
        """A rank's part: fixed, so that the first rank to come leaves room for the last."""
        return self.total_bytes // max(1, self.ranks)

    def affordable(self, slot_bytes: int, *, wanted: int, taken_bytes: int = 0) -> int:
        """Slots of this size that fit beside `taken_bytes` of the same rank, up to `wanted`."""
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
