"""The routes of the page, and the stream by which a browser learns of changes.

A viewer keeps one response open (server-sent events), on which the changed sections are sent.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

from aiohttp import web

from keepstep.errors import UsageError
from keepstep_page.access import HOST
from keepstep_page.board import Board
from keepstep_page.pages import STATIC, Charts, Pages, V

T = TypeVar("T")
_Shown = tuple[dict[str, str], Charts]
"""The sections of a page as HTML, and its charts."""

STATIC_ROUTE: Final = "/static"

_STILL_THERE_S: Final = 15.0
"""How often a comment is sent: a viewer that has left silently is noticed when a write to
it fails.
"""

_AT_ONCE: Final = 64
"""How many pages a viewer may have open; each open tab costs a descriptor."""


class Site(Generic[V]):
    """The runs of one place, and their pages. A page is rendered once for all viewers."""

    def __init__(self, board: Board[V], pages: Pages[V]) -> None:
        self.board, self.pages = board, pages
        self._last: dict[str, tuple[V, _Shown]] = {}

    def index(self) -> _Shown:
        return self.pages.index_sections(self.board.all()), {}

    def run(self, name: str) -> _Shown:
        try:
            view = self.board.view(name)
        except KeyError:
            return self._shown(self.board.gone(name))
        if (known := self._last.get(name)) is None or known[0] is not view:
            there = self.board.views
            self._last = {one: last for one, last in self._last.items() if one in there}
            known = self._last[name] = view, self._shown(view)
        return known[1]

    def _shown(self, view: V) -> _Shown:
        return self.pages.run_sections(view), self.pages.charts(view)


async def _always(_: web.Request) -> bool:
    return True


def _anybody(_: web.Request) -> str:
    return ""


def application(
    site_of: Callable[[web.Request], Site[Any]],
    *,
    middleware: Any,
    sign: Callable[[web.Request, web.StreamResponse], Awaitable[None]],
    who: Callable[[web.Request], str] = _anybody,
    still: Callable[[web.Request], Awaitable[bool]] = _always,
) -> web.Application:
    """All routes, behind `middleware`.

    `sign` puts headers on every answer. `who`: the user of a request, if several may read; their
    open pages are counted separately. `still`: whether the user of an open page may still read it;
    checked before anything more is sent.
    """
    app = web.Application(middlewares=[middleware])
    app.on_response_prepare.append(sign)
    routes = _Routes(site_of, who, still)
    app.router.add_get("/", routes.index, allow_head=False)
    app.router.add_get("/changes", routes.index_changes, allow_head=False)
    app.router.add_get("/runs/{name}", routes.run, allow_head=False)
    app.router.add_get("/runs/{name}/changes", routes.run_changes, allow_head=False)
    app.router.add_static(STATIC_ROUTE, STATIC)
    return app


@contextlib.asynccontextmanager
async def on_loopback(app: web.Application, port: int) -> AsyncIterator[int]:
    """Serve only on 127.0.0.1; yields the port. `port` 0 means a free port. Raises UsageError if
    the port cannot be had.
    """
    # a viewer's response never ends by itself, so it is cancelled; tokens in headers may be long
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.1,
        max_field_size=32 << 10,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {HOST}:{port} ({error.strerror or error}); choose another --port"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def html(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html", charset="utf-8")


class _Routes:
    def __init__(
        self,
        site_of: Callable[[web.Request], Site[Any]],
        who: Callable[[web.Request], str],
        still: Callable[[web.Request], Awaitable[bool]],
    ) -> None:
        self._site_of, self._who, self._still = site_of, who, still
        self._open: Counter[str] = Counter()

    async def index(self, request: web.Request) -> web.Response:
        site = self._site_of(request)
        return html(site.pages.index(await site.board.fresh()))

    async def run(self, request: web.Request) -> web.Response:
        site, name = self._site_of(request), request.match_info["name"]
        await site.board.fresh()
        try:
            view = site.board.view(name)
        except KeyError:
            return html(site.pages.missing(name), status=404)
        return html(site.pages.run(view))

    async def index_changes(self, request: web.Request) -> web.StreamResponse:
        site = self._site_of(request)
        return await self._send(request, site, site.index)

    async def run_changes(self, request: web.Request) -> web.StreamResponse:
        site, name = self._site_of(request), request.match_info["name"]
        return await self._send(request, site, lambda: site.run(name))

    async def _send(
        self, request: web.Request, site: Site[Any], shown: Callable[[], _Shown]
    ) -> web.StreamResponse:
        """Send whatever differs from what this viewer was sent before, until the viewer leaves."""
        who, board = self._who(request), site.board
        if self._open[who] >= _AT_ONCE:
            return web.Response(status=503, text="too many pages are open: close some\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._open[who] += 1
        try:
            with board.viewer(), contextlib.suppress(ConnectionResetError):
                await board.fresh()
                await response.prepare(request)
                sent: _Shown = {}, {}
                while await self._still(request):
                    seen, now = board.changes, shown()
                    sections, charts = _differing(now[0], sent[0]), _differing(now[1], sent[1])
                    if sections or charts:
                        news = json.dumps({"sections": sections, "charts": charts})
                        await response.write(f"data: {news}\n\n".encode())
                        sent = now
                    if not await board.after(seen, timeout_s=_STILL_THERE_S):
                        await response.write(b": still there\n\n")
        finally:
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]
        return response


def _differing(now: dict[str, T], sent: dict[str, T]) -> dict[str, T]:
    return {id: value for id, value in now.items() if sent.get(id) != value}
