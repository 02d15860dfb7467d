"""Long work on the event loop, done in slices of its turns. Other requests are answered between
them.

If each piece of work were a coroutine that yields, each turn would take a part of all of them: with
a thousand reports at once, a health check would wait for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")
Parts = Generator[None, None, T]
"""Work that may be interrupted at each `yield`."""

SLICE_S: Final = 0.01
"""The part of a turn, in seconds. A single part of the work may take longer."""


class Turns:
    """Does one piece of work after the other, for each tenant in the order of arrival. Slices go
    round the tenants, so a short piece waits for one slice of each other tenant, not for a long
    piece. `spent`: is told after each slice whose it was and how many seconds it took; not of CPU,
    as the kernel takes microseconds to tell that."""

    def __init__(self, spent: Callable[[str, float], None] = lambda tenant, seconds: None) -> None:
        self._spent = spent
        self._waiting: dict[str, deque[tuple[Parts[Any], asyncio.Future[Any]]]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def work(self, parts: Parts[T], *, tenant: str) -> T:
        """Do this work when its turn comes. Returns or raises what it does."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append((parts, answer))
        if self._worker is None:
            self._worker = loop.create_task(self._work(), name="work by turns")
        try:
            return await answer
        finally:
            del answer  # as in `_one`

    async def _work(self) -> None:
        began = time.perf_counter()
        while self._waiting:
            tenant = next(iter(self._waiting))
            theirs = self._waiting.pop(tenant)
            parts, answer = theirs[0]
            since = now = time.perf_counter()
            is_over = False
            while not answer.done() and not is_over:
                _one(parts, answer)
                now = time.perf_counter()
                is_over = now - began >= SLICE_S
            self._spent(tenant, now - since)
            if answer.done():
                theirs.popleft()
            if theirs:
                self._waiting[tenant] = theirs  # behind all others
            del answer, theirs  # as in `_one`
            if is_over:
                await asyncio.sleep(0)
                began = time.perf_counter()
        self._worker = None


def _one(parts: Parts[T], answer: asyncio.Future[T]) -> None:
    try:
        next(parts)
    except StopIteration as ended:
        answer.set_result(ended.value)
    except Exception as error:
        answer.set_exception(error)
    finally:
        # The traceback of an error leads to this frame and to those that called it. Without a
        # cycle, it and all that the work held are freed at once.
        del answer
