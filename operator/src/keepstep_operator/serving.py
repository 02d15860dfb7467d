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
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from keepstep_operator import __version__
from keepstep_operator.log import info

_SHUTDOWN_S: Final = 5.0
_KEEPALIVE_S: Final = 5.0
"""An idle connection holds some 80 KiB."""

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


def health_routes(ready: Ready) -> list[web.RouteDef]:
    """`/healthz`: 200 while the process answers. `/readyz`: 503 with a reason until it may get
    work."""

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        reason = ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    return [web.get("/healthz", healthz), web.get("/readyz", readyz)]


def metrics_application(registry: CollectorRegistry, ready: Ready) -> web.Application:
    """The application of the metrics port: `/metrics`, `/healthz`, `/readyz`."""

    async def metrics(request: web.Request) -> web.Response:
        text = generate_latest(registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), *health_routes(ready)])
    return app


@asynccontextmanager
async def serve_application(
    app: web.Application,
    *,
    port: int,
    host: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    shutdown_s: float = _SHUTDOWN_S,
) -> AsyncIterator[int]:
    """Serve `app` on `port` while the context lasts; yields the port. 0: any free port of loopback
    (on all interfaces, IPv4 and IPv6 would get different ports).

    At the end no new connection is accepted, and requests under way get `shutdown_s` to finish.
    """
    host = "127.0.0.1" if host is None and port == 0 else host
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=shutdown_s, keepalive_timeout=_KEEPALIVE_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=ssl_context).start()
        bound: int = runner.addresses[0][1]
        yield bound
    finally:
        await runner.cleanup()


async def until_signal() -> str:
    """Wait for SIGTERM or SIGINT. Returns its name."""
    caught = asyncio.Queue[str]()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, caught.put_nowait, number.name)
    name = await caught.get()
    info("process.stopping", signal=name)
    return name
