"""When the interpreter looks for cycles of objects that nobody refers to any more.

By itself it looks at all objects there are whenever a quarter of them is new. Reports replace what
is known of runs, so that is every second or so here, and nobody is answered meanwhile: for 90 ms
with 1,000 pods, for most of a second with 10,000. But that state has no cycles: it goes with its
last reference. Cycles are what connections and watched objects leave behind, and nearly all of them
end young. So only what is young is looked at by itself, and everything when memory has grown by a
quarter: once an hour or so with 10,000 pods that report.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from typing import Final

_YOUNG: Final = 5_000, 2
"""Objects more than when the young were looked at last; how often until the middle-aged are, too.
Each is a pause of some milliseconds."""
_NEVER: Final = 1 << 30
_SETTLED_S: Final = 120.0
"""After the start, until all sidecars have reported."""
_LOOK_S: Final = 1.0
_GROWN: Final = 1.25
_GIVE_BACK_S: Final = 60.0


def spare_what_stays() -> None:
    """Leave what was imported alone for ever, and what has become old until `collect_when_grown`
    looks at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_YOUNG, _NEVER)


async def collect_when_grown() -> None:
    """For ever."""
    await asyncio.sleep(_SETTLED_S)
    known = sys.getallocatedblocks()
    while True:
        await asyncio.sleep(_LOOK_S)
        if sys.getallocatedblocks() > known * _GROWN:
            gc.collect()
            known = sys.getallocatedblocks()


async def give_back_freed() -> None:
    """For ever: what the C library keeps of freed memory goes back to the kernel. Buffers of a few
    hundred connections at once, as after a start, leave it 80 MB in pieces; that takes 10 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_GIVE_BACK_S)
        trim(0)
