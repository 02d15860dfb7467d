"""Blocking work beside the event loop, so that nobody touches memory after its owner went on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def blocking(executor: Executor | None, work: Callable[[], T]) -> T:
    """Run `work` on a thread (None: the loop's own).

    A cancelled caller waits for it: a thread cannot be stopped, and it may still fill a slot that
    the caller is about to give to somebody else.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # seen: the cancellation is what counts
        raise
