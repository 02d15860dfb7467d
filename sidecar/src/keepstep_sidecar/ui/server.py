"""The routes of the page, and how a browser that shows it hears of changes.

A viewer keeps one response open (server-sent events), on which the sections come that have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from aiohttp import web

from keepstep.errors import UsageError
from keepstep_sidecar.ui import timeline
from keepstep_sidecar.ui.access import HOST, Access
from keepstep_sidecar.ui.board import Board
from keepstep_sidecar.ui.pages import STATIC, Pages
from keepstep_sidecar.ui.view import RunView

T = TypeVar("T")
_Shown = tuple[dict[str, str], dict[str, dict[str, timeline.Line]]]
"""Sections of a page as HTML, and its charts."""

_STILL_THERE_S: Final = 15.0
"""A comment so often: a viewer that went without a word is noticed when it cannot be written to."""

_AT_ONCE: Final = 64
"""Viewers; a tab that is left open costs a descriptor each."""


@asynccontextmanager
async def serving(
    *,
    directory: Path,
    port: int,
    names: Callable[[], Sequence[str]],
    read: Callable[[str], RunView],
    text: Callable[[str], str] = str,
) -> AsyncIterator[str]:
    """Serve the page on this machine; yields its URL. `port` 0: a free one; `names` and `read`: see
    `Board`; `text`: see `Pages`. Raises UsageError where the port cannot be had."""
    access, board = Access(), Board(names, read)
    app = application(access, board, Pages(directory=directory, text=text))
    # a viewer's response never ends by itself
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    keeping = asyncio.create_task(board.keep(), name="read runs")
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {HOST}:{port} ({error.strerror or error}); choose another --port"
            ) from error
        yield access.url(runner.addresses[0][1])
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await runner.cleanup()


def application(access: Access, board: Board, pages: Pages) -> web.Application:
    """All routes, behind `access`."""
    app = web.Application(middlewares=[access.middleware()])
    app.on_response_prepare.append(access.sign)
    routes = _Routes(board, pages)
    app.router.add_get("/", routes.index, allow_head=False)
    app.router.add_get("/changes", routes.index_changes, allow_head=False)
    app.router.add_get("/runs/{name}", routes.run, allow_head=False)
    app.router.add_get("/runs/{name}/changes", routes.run_changes, allow_head=False)
    app.router.add_static("/static", STATIC)
    return app


class _Routes:
    def __init__(self, board: Board, pages: Pages) -> None:
        self._board, self._pages = board, pages
        self._viewers = 0
        self._last: dict[str, tuple[RunView, _Shown]] = {}

    async def index(self, _: web.Request) -> web.Response:
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
        return await self._send(
            request, lambda: (self._pages.index_sections(self._board.all()), {})
        )

    async def run_changes(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]

        def shown() -> _Shown:
            try:
                view = self._board.view(name)
            except KeyError:
                view = RunView(name=name, error="it is not there any more")
            return self._shown(view)

        return await self._send(request, shown)

    def _shown(self, view: RunView) -> _Shown:
        """Worked out once for all who look at this run."""
        if (known := self._last.get(view.name)) is None or known[0] is not view:
            shown = self._pages.run_sections(view), timeline.charts(view)
            known = self._last[view.name] = view, shown
        return known[1]

    async def _send(self, request: web.Request, shown: Callable[[], _Shown]) -> web.StreamResponse:
        """Whatever differs from what this viewer was sent, until it goes."""
        if self._viewers >= _AT_ONCE:
            return web.Response(status=503, text="too many pages are open: close some\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        changes = self._board.changes
        self._viewers += 1
        try:
            with self._board.viewer(), contextlib.suppress(ConnectionResetError):
                await self._board.fresh()
                await response.prepare(request)
                sent: _Shown = {}, {}
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
            self._viewers -= 1
        return response


def _differing(now: dict[str, T], sent: dict[str, T]) -> dict[str, T]:
    return {id: value for id, value in now.items() if sent.get(id) != value}


def _html(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html", charset="utf-8")
