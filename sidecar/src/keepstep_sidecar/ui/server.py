"""The routes of the page, and the stream by which a browser learns of changes.

A viewer keeps one response open (server-sent events), on which the changed sections are sent.
Connections that have not shown the cookie are few, and are ended soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from aiohttp import web

from keepstep.errors import UsageError
from keepstep_sidecar import connections
from keepstep_sidecar.ui.access import ENTRY_ROUTE, HOST, Access, sign
from keepstep_sidecar.ui.board import Board
from keepstep_sidecar.ui.pages import STATIC, Pages, Shown
from keepstep_sidecar.ui.view import RunPage

T = TypeVar("T")

_READERS: Final = 8
_STILL_THERE_S: Final = 15.0
"""How often a comment is sent: a viewer that has left silently is noticed when a write to
it fails.
"""
_AT_ONCE: Final = 64
"""How many pages may be open; each open tab costs a descriptor."""
_STRANGERS, _STRANGER_S = 32, 5.0
"""Connections that have not shown the cookie, and how long each may last: anyone can open them."""
_IDLE_S: Final = 15.0
"""How long a browser's connection stays open between two requests."""


def listen(port: int) -> socket.socket:
    """Listen on 127.0.0.1. `port` 0: any free port. Raises UsageError if it cannot be had."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {HOST}:{port} ({error.strerror or error}); choose another --port"
        ) from error


@contextlib.asynccontextmanager
async def serving(
    listening: socket.socket,
    access: Access,
    *,
    place: str,
    names: Callable[[], Sequence[str]],
    read: Callable[[str], RunPage],
    text: Callable[[str], str],
) -> AsyncIterator[web.Server]:
    """Serve the page on `listening`, which is closed in the end. `names`, `read`: see `Board`.
    `place`, `text`: see `Pages`."""
    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="keepstep-ui-read")
    strangers: connections.Strangers[asyncio.Transport] = connections.Strangers(
        lambda transport: transport.abort(),
        most=_STRANGERS,
        most_each=_STRANGERS,
        seconds=_STRANGER_S,
    )

    def admitted(request: web.Request) -> None:
        assert request.transport is not None
        strangers.leave(request.transport)

    routes = _Routes(Board(names, read, readers), Pages(place=place, text=text), access)
    app = web.Application(middlewares=[access.middleware(admitted)])
    app.on_response_prepare.append(sign)
    app.router.add_get("/", routes.index, allow_head=False)
    app.router.add_get("/changes", routes.index_changes, allow_head=False)
    app.router.add_get("/runs/{name}", routes.run, allow_head=False)
    app.router.add_get("/runs/{name}/changes", routes.run_changes, allow_head=False)
    app.router.add_get(ENTRY_ROUTE, routes.entry, allow_head=False)
    app.router.add_static("/static", STATIC)
    # a viewer's response never ends by itself, so it is cancelled
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.1,
        keepalive_timeout=_IDLE_S,
    )
    await runner.setup()
    assert runner.server is not None
    accepting = asyncio.create_task(
        connections.serve(runner.server, listening, strangers), name="accept connections"
    )
    try:
        yield runner.server
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        listening.close()
        await runner.cleanup()
        readers.shutdown(wait=False, cancel_futures=True)


class _Routes:
    """Each page is rendered once for all its viewers."""

    def __init__(self, board: Board, pages: Pages, access: Access) -> None:
        self._board, self._pages, self._access = board, pages, access
        self._last: dict[str, tuple[RunPage, Shown]] = {}
        self._open = 0

    async def index(self, request: web.Request) -> web.Response:
        return _html(self._pages.index(await self._board.fresh()))

    async def run(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._board.fresh()
        try:
            view = self._board.view(name)
        except KeyError:
            return _html(self._pages.missing(name), status=404)
        return _html(self._pages.run(view))

    async def index_changes(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, lambda: self._pages.index_sections(self._board.all()))

    async def entry(self, request: web.Request) -> web.StreamResponse:
        """A token for a browser. The response stays open, and with it the page, until the command
        that asked for the token ends."""
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            await response.write(f"{self._access.token()}\n".encode())
            while True:
                await asyncio.sleep(_STILL_THERE_S)
                await response.write(b"\n")
        return response

    async def run_changes(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        return await self._send(request, lambda: self._shown(name))

    def _shown(self, name: str) -> Shown:
        try:
            view = self._board.view(name)
        except KeyError:
            gone = RunPage(name=name, error="it is not there any more")
            return self._pages.run_sections(gone)
        if (known := self._last.get(name)) is None or known[0] is not view:
            there = self._board.views
            self._last = {run: last for run, last in self._last.items() if run in there}
            known = self._last[name] = view, self._pages.run_sections(view)
        return known[1]

    async def _send(self, request: web.Request, shown: Callable[[], Shown]) -> web.StreamResponse:
        """Send whatever differs from what this viewer was sent before, until the viewer leaves."""
        if self._open >= _AT_ONCE:
            return web.Response(status=503, text="too many pages are open: close some\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        board, changes = self._board, self._board.changes
        self._open += 1
        try:
            with board.viewer(), contextlib.suppress(ConnectionResetError):
                await board.fresh()
                await response.prepare(request)
                sent: Shown = {}, {}
                while True:
                    seen, now = changes.count, shown()
                    sections, charts = _differing(now[0], sent[0]), _differing(now[1], sent[1])
                    if sections or charts:
                        news = json.dumps({"sections": sections, "charts": charts})
                        await response.write(f"data: {news}\n\n".encode())
                        sent = now
                    if not await changes.after(seen, timeout_s=_STILL_THERE_S):
                        await response.write(b": still there\n\n")
        finally:
            self._open -= 1
        return response


def _html(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html", charset="utf-8")


def _differing(now: dict[str, T], sent: dict[str, T]) -> dict[str, T]:
    return {id: value for id, value in now.items() if sent.get(id) != value}
