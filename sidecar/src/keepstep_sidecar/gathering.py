"""Several coroutines at a time, all of which have ended before anybody goes on.

Unlike a task group, nothing is cancelled because another one failed: whoever hears of the error
must be able to use again the buffers that the others were filling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def all_of(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results, once all have ended; then the first error. Cancelling cancels all of them."""
    return _results(await asyncio.gather(*work, return_exceptions=True))


async def all_threads(work: Sequence[asyncio.Future[T]]) -> list[T]:
    """The same for what runs on threads, which nobody can cancel: they are awaited even then."""
    joined = asyncio.gather(*work, return_exceptions=True)
    try:
        return _results(await asyncio.shield(joined))
    except asyncio.CancelledError:
        await joined
        raise


def _results(results: Sequence[T | BaseException]) -> list[T]:
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


async def few_at_once(calls: Sequence[Callable[[], Awaitable[T]]], *, most: int) -> list[T]:
    """`all_of` the calls, at most so many at a time."""
    slots = asyncio.Semaphore(most)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await call()

    return await all_of([one(call) for call in calls])
