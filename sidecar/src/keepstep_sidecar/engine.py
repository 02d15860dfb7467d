"""How bytes move between a slot and a file: chunk by chunk, on a few threads, hashed on the way.

`Direct` is O_DIRECT: the drive reads and writes the slot's own pages, nothing is copied and the
page cache stays as it was. `Buffered` serves file systems that refuse it. Threads hold no GIL
while they hash or wait for the drive, and run at a lower priority than training.
"""

from __future__ import annotations

import enum


class Engine(str, enum.Enum):
    """How a volume reads and writes its files."""

    DIRECT = "direct"
    BUFFERED = "buffered"

    def __str__(self) -> str:
        return self.value
