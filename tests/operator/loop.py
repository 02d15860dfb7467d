"""Tests as coroutines, each with a loop and a deadline of its own."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

_DEADLINE_S = 60.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an `async def test_...`; pytest sees the same parameters."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def with_deadline() -> None:
            async with asyncio.timeout(_DEADLINE_S):
                await test(**fixtures)

        asyncio.run(with_deadline())

    return run


async def eventually(condition: Callable[[], Any], *, within_s: float = 15.0) -> Any:
    """The first true value of `condition` (or of what it awaits); fails when there is none."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if loop.time() > deadline:
            pytest.fail(f"not within {within_s} s: {condition}")
        await asyncio.sleep(0.01)
