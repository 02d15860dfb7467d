"""`--verify`: how much of a shard is checked before it is restored."""

from __future__ import annotations

from keepstep.steps import StrEnum


class Verify(StrEnum):
    """What is checked of a shard that is read: every byte, or its seal and digest table only."""

    FULL = "full"
    SEAL = "seal"
