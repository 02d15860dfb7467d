"""A sidecar that meets an error at an await: `python -m tests.faults.interrupt COUNT OPTIONS...`.

The COUNT-th time that a request or a background task waits, an error comes instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from aiohttp import web

from keepstep_sidecar import concurrency
from keepstep_sidecar.__main__ import main
from keepstep_sidecar.api import server


class Injected(Exception):
    """No error of ours, nor one that anybody foresaw."""


class _Interrupted:
    """A coroutine that meets an error where it waits, if it is the one that is counted down to."""

    left = 0

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        while True:
            try:
                waits_for = resume()
            except StopIteration as ended:
                return ended.value
            _Interrupted.left -= 1
            if _Interrupted.left == 0:
                if hasattr(waits_for, "_asyncio_future_blocking"):
                    waits_for._asyncio_future_blocking = False  # nobody waits for it any more
                resume = lambda: self._work.throw(Injected("at an await"))  # noqa: E731
                continue
            try:
                yield waits_for
            except BaseException as error:
                thrown = error
                resume = lambda: self._work.throw(thrown)  # noqa: B023, E731
            else:
                resume = lambda: self._work.send(None)  # noqa: E731


def interrupt(count: int) -> None:
    """To be called before the sidecar serves."""
    _Interrupted.left = count
    guarded, problems = concurrency._guarded, server._problems

    async def interrupted(work: Coroutine[Any, Any, None]) -> None:
        await _Interrupted(work)

    @web.middleware
    async def strike(request: web.Request, handler: Any) -> web.StreamResponse:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await _Interrupted(handler(request))  # type: ignore[no-any-return]

        return await problems(request, handle)

    concurrency._guarded = lambda work, name: guarded(interrupted(work), name)
    server._problems = strike


if __name__ == "__main__":
    interrupt(int(sys.argv.pop(1)))
    main()
