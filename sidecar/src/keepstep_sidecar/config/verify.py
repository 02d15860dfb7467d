"""`--verify`: how much of a shard is checked before it is restored."""

from __future__ import annotations

import enum


class Verify(str, enum.Enum):
    """What is checked of a shard that is read: every byte, or its seal and digest table only."""

    FULL = "full"
    SEAL = "seal"

    def __str__(self) -> str:
        return self.value
