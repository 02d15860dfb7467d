"""One bell for everything that waits: whoever changes the state rings, waiters look again.

All state lives on one event loop, so a predicate that is false stays false until the bell rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes every waiter at every change; a handful of long polls, so that costs nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """The state has changed; `count` grows."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, reached: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `reached()`; False when `timeout_s` have passed without."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not reached():
            left_s = deadline - loop.time()
            if left_s <= 0:
                return False
            waiter = loop.create_future()
            self._waiters.add(waiter)
            timer = loop.call_later(left_s, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiters.discard(waiter)
        return True


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
