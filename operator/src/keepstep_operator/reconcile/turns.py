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
    """One piece of work after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Parts[Any], asyncio.Future[Any]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def work(self, parts: Parts[T]) -> T:
        """What it returns, or raises, when its turn has come."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.append((parts, answer))
        if self._worker is None:
            self._worker = loop.create_task(self._work(), name="work by turns")
        return await answer

    async def _work(self) -> None:
        began = time.perf_counter()
        while self._waiting:
            parts, answer = self._waiting.popleft()
            while not answer.done():
                _one(parts, answer)
                if time.perf_counter() - began >= SLICE_S:
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
