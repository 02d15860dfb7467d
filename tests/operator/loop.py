"""Tests as coroutines, each with a loop and a deadline of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

_DEADLINE_S = 110.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an `async def test_...`; pytest sees the same parameters."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def with_deadline() -> None:
            async with asyncio.timeout(_DEADLINE_S):
                await test(**fixtures)

        asyncio.run(with_deadline())

    return run
