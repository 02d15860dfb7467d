"""The page's server: who may read, what all viewers see, and the routes.

A browser asks for the changing parts of its page every second. Connections that have not shown the
cookie are few, and are ended soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
import os
import resource
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar import unauthenticated_connections
from keepstep_sidecar.ui.pages import STATIC, Pages, Shown
from keepstep_sidecar.ui.run_figures import RunPage

# --- access ----------------------------------------------------------------------------------


HOST: Final = "127.0.0.1"
ENTRY_ROUTE: Final = "/entry"
_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""The host names under which the page answers. `ssh -L` may change the port, but never the name."""
_UNUSED: Final = 16
"""The most tokens that wait for their browser; the oldest one is dropped."""

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_WELCOME: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>keepstep</title>'
    '<link rel="icon" href="/static/icon.svg">'
    '<meta http-equiv="refresh" content="0; url={0}"><p><a href="{0}">keepstep</a></p></html>'
)
"""This page is not a redirect, because a redirect after a link on another site would not carry the
cookie.
"""


class PageAccess:
    """The access to the page of one process. `command`: the command that prints its URL.

    `secret`: what a request for `ENTRY_ROUTE` must show; '': no request may have that route.
    """

    def __init__(self, command: str, *, secret: str = "") -> None:
        self._command, self._secret = command, secret
        self._cookie = secrets.token_urlsafe(32)
        self._tokens: deque[str] = deque(maxlen=_UNUSED)

    def url(self, port: int) -> str:
        """A URL that lets in one browser, once."""
        return f"http://{HOST}:{port}/?token={self.issue_single_use_token()}"

    def issue_single_use_token(self) -> str:
        """A token that lets in one browser, once."""
        self._tokens.append(token := secrets.token_urlsafe(32))
        return token

    def middleware(self, admitted: Callable[[web.Request], None]) -> Middleware:
        """Checks every request before its route runs. `admitted`: called with those that may
        read."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            if (answer := _refusal(request) or self._entry(request)) is not None:
                return answer
            admitted(request)
            return await handler(request)

        return guarded

    def _entry(self, request: web.Request) -> web.Response | None:
        """None for a request that may have its route; a page that sets the cookie for a request
        with a token; else a refusal.
        """
        if request.path == ENTRY_ROUTE:
            shown = request.headers.get("Authorization", "")
            if self._secret and _same(shown, f"Bearer {self._secret}"):
                return None
            return _refused(403, "this is the page of another pod, or not for you")
        cookie = f"keepstep-ui-{_host(request)[1]}"
        if _same(request.cookies.get(cookie, ""), self._cookie):
            return None
        token = request.query.get("token", "")
        if (known := next((entry for entry in self._tokens if _same(token, entry)), None)) is None:
            why = (
                f"open the URL that `{self._command}` printed: its token lets in one browser, once"
            )
            return _refused(403, f"{why}; for another one, start the command again")
        self._tokens.remove(known)
        onward = html.escape("/" + request.rel_url.raw_path.lstrip("/"))
        response = web.Response(text=_WELCOME.format(onward), content_type="text/html")
        response.set_cookie(cookie, self._cookie, httponly=True, samesite="Strict", path="/")
        return response


def _refusal(request: web.Request) -> web.Response | None:
    if request.method != "GET":
        text = "this page is read, nothing else: only GET is answered\n"
        return web.Response(status=405, text=text, headers={"Allow": "GET"})
    if _host(request)[0] not in _NAMES:
        return _refused(421, f"ask for {HOST} or localhost: this page has no other name")
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.headers['Host']}":
        return _refused(403, "this page is not for pages of other origins")
    return None


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Put the headers on every answer, including errors of the routes; see
    `on_response_prepare`.
    """
    response.headers.update(_HEADERS)
    response.headers.pop("Server", None)


def _host(request: web.Request) -> tuple[str, str]:
    """The name in the Host header and its port, as the browser knows them."""
    host = request.headers.get("Host", "")
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        return name.lower(), port
    return host.lower(), "80"


def _same(text: str, secret: str) -> bool:
    return secrets.compare_digest(text.encode(errors="surrogateescape"), secret.encode())


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n")


# --- what all viewers see --------------------------------------------------------------------


EVERY_S: Final = 0.9
"""A run is read again when it is asked for this long after the last read. A page asks every second,
so a change is seen within 2 s."""

_log = logging.getLogger("keepstep.ui")


class RunBoard:
    """The runs as they were read last.

    `names`: lists the runs. `read`: reads one run. Both may block: runs are read on threads of
    `readers`, and listed on another one, so that a read that hangs does not stop the list.
    """

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        read: Callable[[str], RunPage],
        readers: Executor,
    ) -> None:
        self.reads = 0
        self._names, self._read, self._readers = names, read, readers
        self._views: dict[str, RunPage] = {}
        self._listed: tuple[str, ...] = ()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._read_at: dict[str, float] = {}

    async def get_fresh_pages(
        self, only: str = "", *, timeout_s: float = 3.0
    ) -> tuple[RunPage, ...]:
        """All runs; those that were read some time ago, or `only` that one, are read again. A run
        that does not answer within `timeout_s` is as it was read last. Raises what listing the runs
        raises."""
        await self._list()
        before = time.monotonic() - EVERY_S
        asked = [name for name in self._listed if not only or name == only]
        stale = [name for name in asked if self._read_at.get(name, 0.0) < before]
        if begun := [self._begin(name) for name in stale]:
            await asyncio.wait(begun, timeout=timeout_s)
        return tuple(self.view(name) for name in self._listed)

    def view(self, name: str) -> RunPage:
        """One run as it was read last. Raises KeyError if there is no such run."""
        if name not in self._listed:
            raise KeyError(name)
        return self._views.get(name) or RunPage(name=name, error="it has not answered yet")

    async def _list(self) -> None:
        listed = tuple(await asyncio.get_running_loop().run_in_executor(None, self._names))
        if listed != self._listed:
            self._listed = listed
            self._views = {name: view for name, view in self._views.items() if name in listed}
            self._read_at = {name: at for name, at in self._read_at.items() if name in listed}

    def _begin(self, name: str) -> asyncio.Task[None]:
        """Begin to read the run, or return the read that is under way."""
        if (reading := self._reading.get(name)) is None:
            reading = asyncio.create_task(self._refresh(name), name=f"read {name}")
            self._reading[name] = reading
        return reading

    async def _refresh(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            view = await loop.run_in_executor(self._readers, self._read, name)
        except KeepstepError as error:
            view = RunPage(name=name, error=str(error))
        except Exception as error:
            _log.exception("page.read_crashed", extra={"fields": {"run": name}})
            view = RunPage(name=name, error=f"{type(error).__name__}: {error}")
        finally:
            self._reading.pop(name, None)
        self.reads += 1
        self._read_at[name] = time.monotonic()
        if name in self._listed:
            self._views[name] = view


# --- routes ----------------------------------------------------------------------------------


_READERS: Final = 8
_STILL_THERE_S: Final = 15.0
"""How often a line is sent: a command that has left silently is noticed when a write to it
fails."""
_STRANGERS, _STRANGER_S = 32, 5.0
"""Connections that have not shown the cookie, and how long each may last: anyone can open them."""
_IDLE_S: Final = 15.0
"""How long a browser's connection stays open between two requests."""


def listen_on_loopback(port: int) -> socket.socket:
    """Listen on 127.0.0.1. `port` 0: any free port. Raises UsageError if it cannot be had."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {HOST}:{port} ({error.strerror or error}); choose another --port"
        ) from error


@contextlib.asynccontextmanager
async def serve_page(
    listening: socket.socket,
    access: PageAccess,
    *,
    place: str,
    names: Callable[[], Sequence[str]],
    read: Callable[[str], RunPage],
    text: Callable[[str], str],
) -> AsyncIterator[web.Server]:
    """Serve the page on `listening`, which is closed in the end. `names`, `read`: see `RunBoard`.
    `place`, `text`: see `Pages`."""
    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="keepstep-ui-read")
    strangers: unauthenticated_connections.UnauthenticatedConnections[asyncio.Transport] = (
        unauthenticated_connections.UnauthenticatedConnections(
            lambda transport: transport.abort(),
            most=_STRANGERS,
            most_each=_STRANGERS,
            seconds=_STRANGER_S,
        )
    )

    def admitted(request: web.Request) -> None:
        assert request.transport is not None
        strangers.leave(request.transport)

    routes = _Routes(RunBoard(names, read, readers), Pages(place=place, text=text), access)
    app = web.Application(middlewares=[access.middleware(admitted)])
    app.on_response_prepare.append(add_headers)
    app.router.add_get("/", routes.index, allow_head=False)
    app.router.add_get("/changes", routes.index_changes, allow_head=False)
    app.router.add_get("/runs/{name}", routes.run, allow_head=False)
    app.router.add_get("/runs/{name}/changes", routes.run_changes, allow_head=False)
    app.router.add_get(ENTRY_ROUTE, routes.entry, allow_head=False)
    app.router.add_static("/static", STATIC)
    # the answer with a token never ends by itself, so it is cancelled
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
        unauthenticated_connections.serve_connections(runner.server, listening, strangers),
        name="accept connections",
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
    def __init__(self, board: RunBoard, pages: Pages, access: PageAccess) -> None:
        self._board, self._pages, self._access = board, pages, access

    async def index(self, request: web.Request) -> web.Response:
        return _html(self._pages.index(await self._board.get_fresh_pages()))

    async def run(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if (view := await self._view(name)) is None:
            return _html(self._pages.missing(name), status=404)
        return _html(self._pages.run(view))

    async def _view(self, name: str) -> RunPage | None:
        await self._board.get_fresh_pages(name)
        with contextlib.suppress(KeyError):
            return self._board.view(name)
        return None

    async def index_changes(self, _: web.Request) -> web.Response:
        return _json(self._pages.index_sections(await self._board.get_fresh_pages()))

    async def run_changes(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        gone = RunPage(name=name, error="it is not there any more")
        return _json(self._pages.run_sections(await self._view(name) or gone))

    async def entry(self, request: web.Request) -> web.StreamResponse:
        """A token for a browser. The response stays open, and with it the page, until the command
        that asked for the token ends."""
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            await response.write(f"{self._access.issue_single_use_token()}\n".encode())
            while True:
                await asyncio.sleep(_STILL_THERE_S)
                await response.write(b"\n")
        return response


def _html(text: str, *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html", charset="utf-8")


def _json(shown: Shown) -> web.Response:
    sections, charts = shown
    return web.json_response({"sections": sections, "charts": charts})


# --- the page of a pod -----------------------------------------------------------------------


SECRET: Final = "KEEPSTEP_UI_SECRET"
_UNUSED_S: Final = 30.0
_LEAST_NICE: Final = 19
_MEMORY_BYTES: Final = 160 << 20
"""The sidecar's memory limit counts for the page, too: rather the page fails than the sidecar."""


async def serve_pod(
    fd: int, run: str, *, read: Callable[[str], RunPage], text: Callable[[str], str]
) -> None:
    """Serve the page of `run` on the listening socket `fd`. Returns when it had no connection for
    half a minute. `read`, `text`: see `serve_page`."""
    os.nice(_LEAST_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    access = PageAccess("kubectl keepstep ui", secret=os.environ.get(SECRET, ""))
    place = f"pod {socket.gethostname()}"
    async with serve_page(
        socket.socket(fileno=fd), access, place=place, names=lambda: (run,), read=read, text=text
    ) as server:
        await _unused(server)


async def _unused(server: web.Server) -> None:
    unused_s = 0.0
    while unused_s < _UNUSED_S:
        await asyncio.sleep(1.0)
        unused_s = 0.0 if server.connections else unused_s + 1.0
