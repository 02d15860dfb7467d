"""Listening, and ending in order: what every component's process does besides its own work.

On SIGTERM a component at once reports that it is not ready. It goes on answering while the cluster
takes it out of its Services (`drain_s`), then lets requests under way finish, and ends.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge

from keepstep_operator import __version__
from keepstep_operator.connections import YOUNG_OF_A_SOURCE, Limits
from keepstep_operator.exposition import Exposition
from keepstep_operator.journal import say

_SHUTDOWN_S: Final = 5.0
_KEEPALIVE_S: Final = 30.0

Ready = Callable[[], str]
"""Returns why the process is not ready; '' if it is."""


def metrics_registry() -> CollectorRegistry:
    """A new registry for a process, with the metric that all components have: the version."""
    registry = CollectorRegistry()
    build = Gauge(
        "keepstep_operator_build_info",
        "1, labelled with the version",
        ("version",),
        registry=registry,
    )
    build.labels(__version__).set(1)
    return registry


def health_routes(ready: Ready, *, stuck: Ready = str) -> list[web.RouteDef]:
    """`/healthz`: 200 while the process answers; 503 with a reason while it is `stuck`. `/readyz`:
    503 with a reason until it may get work."""

    async def healthz(request: web.Request) -> web.Response:
        reason = stuck()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def readyz(request: web.Request) -> web.Response:
        reason = ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    return [web.get("/healthz", healthz), web.get("/readyz", readyz)]


def observed(registry: CollectorRegistry, ready: Ready) -> web.Application:
    """The application of the metrics port: `/metrics`, `/healthz`, `/readyz`."""
    app = web.Application()
    app.add_routes([web.get("/metrics", Exposition(registry).answer), *health_routes(ready)])
    return app


@asynccontextmanager
async def listening(
    app: web.Application,
    *,
    port: int,
    host: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    shutdown_s: float = _SHUTDOWN_S,
    one_request: bool = False,
    of_a_source: int = YOUNG_OF_A_SOURCE,
) -> AsyncIterator[int]:
    """Serve `app` on `port` while the context lasts; yields the port. 0: any free port of loopback
    (on all interfaces, IPv4 and IPv6 would get different ports).

    At the end no new connection is accepted, and requests under way get `shutdown_s` to finish.
    `one_request`: every answer of `app` ends its connection. `of_a_source`: see `Limits`.
    """
    host = "127.0.0.1" if host is None and port == 0 else host
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=_KEEPALIVE_S,
        lingering_time=0.0,  # if the head is refused, the body is not read
    )
    await runner.setup()
    if runner.server is None:
        raise RuntimeError("the application was not set up")
    loop = asyncio.get_running_loop()
    limits = Limits(runner.server, ssl_context, one_request=one_request, of_a_source=of_a_source)
    listener = await loop.create_server(limits, host, port, backlog=128, start_serving=True)
    try:
        bound: int = listener.sockets[0].getsockname()[1]
        yield bound
    finally:
        for one in listener.sockets:
            loop.remove_reader(one.fileno())
        # Accepted connections are set up in the loop's next turns. asyncio loses them if the
        # listener is closed meanwhile (Python 3.11: Server._attach).
        await _turns()
        listener.close()
        await runner.cleanup()
        limits.end_all()
        await _turns()  # an aborted connection is closed in the next turn


async def _turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def body_of(request: web.Request, *, most_bytes: int) -> bytes:
    """The body of a request. If the client stops sending, nothing of the body is kept: aiohttp's
    error refers to itself through its frames, so only the garbage collector would free what these
    hold. Raises HTTPRequestEntityTooLarge, HTTPBadRequest."""
    body = bytearray()
    try:
        async for part in request.content.iter_any():
            body += part
            if len(body) > most_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=len(body))
        return bytes(body)
    except ConnectionError:
        raise web.HTTPBadRequest(reason="the body ended before its end") from None
    finally:
        body.clear()


async def until_signal() -> str:
    """Wait for SIGTERM or SIGINT. Returns its name."""
    loop = asyncio.get_running_loop()
    caught: asyncio.Future[str] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not caught.done():
            caught.set_result(number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number)
    name = await caught
    say("ending", signal=name)
    return name
