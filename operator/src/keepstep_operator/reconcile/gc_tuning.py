"""When the interpreter looks for unreachable cycles of objects.

By default it looks at all objects whenever a quarter of them is new. Each report replaces what is
known of a run, so here that would be every second or so, and no request is answered meanwhile: for
90 ms with 1,000 pods, for a second with 10,000. But this state has no cycles: it is freed with its
last reference. The cycles come from connections and watched objects, and nearly all of them die
young. So only the young generations are collected automatically. Everything is collected when
memory has grown by a quarter: about once an hour with 10,000 pods that report. Large reports make
it grow for a moment, and as often as a tenant likes; so a collection that finds little is followed
by a longer pause.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from typing import Final

_YOUNG: Final = 5_000, 10
"""Thresholds: by how many objects their number must grow for a collection of the youngest, and how
many of these there are for one of the middle generation. Each collection is a pause of some
milliseconds."""
_NEVER: Final = 1 << 30
_SETTLED_S: Final = 120.0
"""From the start until all sidecars have reported."""
_LOOK_S: Final = 1.0
_GROWN: Final = 1.25
_IN_VAIN: Final = 8.0
"""How much longer the next pause is when less than half of the growth was garbage."""
_LONGEST_PAUSE_S: Final = 600.0
_GIVE_BACK_S: Final = 60.0


def spare_what_stays() -> None:
    """Never collect what was imported, and collect old objects only in `collect_when_grown`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_YOUNG, _NEVER)


def collect_after_listing() -> None:
    """Collect all generations once. kopf's objects refer to each other in cycles. Of a listing of
    ten thousand, so many wait at a time that they reach the oldest generation before they are
    garbage: 3 KB for each object, between which all that stays would lie."""
    gc.collect()


async def collect_when_grown() -> None:
    """Collect all generations when memory has grown by a quarter. Runs for ever."""
    await asyncio.sleep(_SETTLED_S)
    left, pause_s = sys.getallocatedblocks(), _LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        if (grown := sys.getallocatedblocks()) > left * _GROWN:
            gc.collect()
            before, left = left, sys.getallocatedblocks()
            in_vain = grown - left < (grown - before) / 2
            pause_s = min(pause_s * _IN_VAIN, _LONGEST_PAUSE_S) if in_vain else _LOOK_S


async def give_back_freed() -> None:
    """Every minute, return the freed memory that the C library keeps to the kernel; it takes 10 ms.
    Otherwise buffers of a few hundred connections at once, as after a start, leave 80 MB in pieces.
    Runs for ever."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_GIVE_BACK_S)
        trim(0)
