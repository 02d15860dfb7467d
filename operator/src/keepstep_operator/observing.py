"""The metrics port in a thread of its own, so that probes are answered while the loop works.

Everything else of a process shares one event loop, and some of its turns take tens of milliseconds.
Only `/metrics` is still made in that loop, because it reads what the loop changes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from keepstep_operator.exposition import Exposition
from keepstep_operator.serving import Ready, health_routes, listening

STUCK_S: Final = 5.0
"""A loop that has not turned for so long is not alive."""
_BEAT_S: Final = 0.25
_SWITCH_S: Final = 0.0005
"""How long a thread keeps the interpreter while another waits for it; Python's default is ten times
as much. An answer takes it several times."""


class _Pulse:
    """Whether an event loop turns. Read by other threads."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    async def beat(self) -> None:
        """Note each turn that comes, for ever."""
        while True:
            self._at = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    def stuck(self) -> str:
        """Why the loop is not alive; '' if it is."""
        still_s = time.monotonic() - self._at
        return f"the event loop has not turned for {still_s:.0f} s" if still_s > STUCK_S else ""


@asynccontextmanager
async def observing(registry: CollectorRegistry, ready: Ready, *, port: int) -> AsyncIterator[int]:
    """As `serving.observed`, from another thread, while the context lasts; yields the port.
    `ready` is called in that thread."""
    sys.setswitchinterval(_SWITCH_S)
    loop, pulse, metrics = asyncio.get_running_loop(), _Pulse(), Exposition(registry).answer

    async def tell_metrics(request: web.Request) -> web.StreamResponse:
        here = asyncio.run_coroutine_threadsafe(metrics(request), loop)
        return await asyncio.wrap_future(here)

    app = web.Application()
    app.add_routes([web.get("/metrics", tell_metrics), *health_routes(ready, stuck=pulse.stuck)])
    apart = _Apart(app, port)
    beating = loop.create_task(pulse.beat(), name="beat")
    apart.start()
    try:
        yield await asyncio.wrap_future(apart.bound)
    finally:
        beating.cancel()
        apart.end()
        await asyncio.to_thread(apart.join)


class _Apart(threading.Thread):
    """Serves an application until `end`. `bound`: the port."""

    def __init__(self, app: web.Application, port: int) -> None:
        super().__init__(name="observe", daemon=True)
        self.bound: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._app = app
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def end(self) -> None:
        """Let the thread end; called from another one."""
        self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self) -> None:
        try:
            async with listening(self._app, port=self._port) as port:
                self.bound.set_result(port)
                await self._ended.wait()
        except OSError as error:
            if self.bound.done():
                raise
            self.bound.set_exception(error)
