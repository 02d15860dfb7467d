"""The page's server: who may read, what all viewers see, the routes, and the stream by which a
browser learns of changes.

A viewer keeps one response open (server-sent events), on which the changed sections are sent.
Connections that have not shown the cookie are few, and are ended soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import logging
import os
import resource
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar import connections
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.ui.pages import STATIC, Pages, Shown
from keepstep_sidecar.ui.timeline import RunPage

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


class Access:
    """The access to the page of one process. `command`: the command that prints its URL.

    `secret`: what a request for `ENTRY_ROUTE` must show; '': no request may have that route.
    """

    def __init__(self, command: str, *, secret: str = "") -> None:
        self._command, self._secret = command, secret
        self._cookie = secrets.token_urlsafe(32)
        self._tokens: deque[str] = deque(maxlen=_UNUSED)

    def url(self, port: int) -> str:
        """A URL that lets in one browser, once."""
        return f"http://{HOST}:{port}/?token={self.token()}"

    def token(self) -> str:
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
        if (known := next((one for one in self._tokens if _same(token, one)), None)) is None:
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


async def sign(_: web.Request, response: web.StreamResponse) -> None:
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


EVERY_S: Final = 1.0
"""The pause between two reads of a run. With the time of the read and of the page, a change is seen
within 2 s.
"""

_log = logging.getLogger("keepstep.ui")


class Board:
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
        self.views: dict[str, RunPage] = {}
        self.changes = Changes()
        self.reads = 0
        self._names, self._read, self._readers = names, read, readers
        self._listed: tuple[str, ...] = ()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._read_at: dict[str, float] = {}
        self._viewers = 0
        self._keeping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """A viewer, for as long as this context is open."""
        self._viewers += 1
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="read runs")
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._keeping.cancel()
                self._keeping = None

    async def _keep(self) -> None:
        """Read the runs until cancelled, when there is no viewer any more."""
        while True:
            try:
                await self._list()
            except (OSError, KeepstepError) as error:  # may be away for only a moment
                _log.warning("the runs cannot be listed: %s", error)
            for name in self._listed:
                self._begin(name)
            await asyncio.sleep(EVERY_S)

    async def fresh(self, *, timeout_s: float = 3.0) -> tuple[RunPage, ...]:
        """All runs, each as recent as a viewer would see it. Runs that do not answer within
        `timeout_s` are returned as they were read last. Raises what listing the runs raises.
        """
        await self._list()
        before = time.monotonic() - EVERY_S
        stale = [name for name in self._listed if self._read_at.get(name, 0.0) < before]
        if begun := [self._begin(name) for name in stale]:
            await asyncio.wait(begun, timeout=timeout_s)
        return self.all()

    def all(self) -> tuple[RunPage, ...]:
        """All runs as they were read last, in the order of their list."""
        return tuple(self.view(name) for name in self._listed)

    def view(self, name: str) -> RunPage:
        """One run as it was read last. Raises KeyError if there is no such run."""
        if name not in self._listed:
            raise KeyError(name)
        return self.views.get(name) or RunPage(name=name, error="it has not answered yet")

    async def _list(self) -> None:
        listed = tuple(await asyncio.get_running_loop().run_in_executor(None, self._names))
        if listed != self._listed:
            self._listed = listed
            self.views = {name: view for name, view in self.views.items() if name in listed}
            self._read_at = {name: at for name, at in self._read_at.items() if name in listed}
            self.changes.ring()

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
            _log.exception("cannot read run %s", name)
            view = RunPage(name=name, error=f"{type(error).__name__}: {error}")
        finally:
            self._reading.pop(name, None)
        self.reads += 1
        self._read_at[name] = time.monotonic()
        if view != self.views.get(name) and name in self._listed:
            self.views[name] = view
            self.changes.ring()


# --- routes ----------------------------------------------------------------------------------


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
    half a minute. `read`, `text`: see `serving`."""
    os.nice(_LEAST_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    access = Access("kubectl keepstep ui", secret=os.environ.get(SECRET, ""))
    place = f"pod {socket.gethostname()}"
    async with serving(
        socket.socket(fileno=fd), access, place=place, names=lambda: (run,), read=read, text=text
    ) as server:
        await _unused(server)


async def _unused(server: web.Server) -> None:
    unused_s = 0.0
    while unused_s < _UNUSED_S:
        await asyncio.sleep(1.0)
        unused_s = 0.0 if server.connections else unused_s + 1.0
