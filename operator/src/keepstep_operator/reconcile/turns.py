"""Long work on the event loop, a slice of each of its turns: what else asks is answered between.

Were each piece of work a coroutine that yields, a turn would take a part of all of them: with a
thousand reports at once whoever asks for health would wait for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")
Parts = Generator[None, None, T]
"""Work that may be interrupted where it yields."""

SLICE_S: Final = 0.01
"""Of a turn; one part may take longer."""


class Turns:
    """One piece of work after the other, of each tenant in the order in which they came. The slices
    go round the tenants, so that a short piece waits for a slice of each, not for a long one."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[Parts[Any], asyncio.Future[Any]]]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def work(self, parts: Parts[T], *, tenant: str) -> T:
        """What it returns, or raises, when its turn has come."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append((parts, answer))
        if self._worker is None:
            self._worker = loop.create_task(self._work(), name="work by turns")
        return await answer

    async def _work(self) -> None:
        began = time.perf_counter()
        while self._waiting:
            tenant = next(iter(self._waiting))
            theirs = self._waiting.pop(tenant)
            parts, answer = theirs[0]
            is_over = False
            while not answer.done() and not is_over:
                _one(parts, answer)
                is_over = time.perf_counter() - began >= SLICE_S
            if answer.done():
                theirs.popleft()
            if theirs:
                self._waiting[tenant] = theirs  # behind all others
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
