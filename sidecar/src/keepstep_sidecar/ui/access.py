"""Decides which requests may read the page: those of a browser that was given a token.

Other users of the machine can reach the port, and so can containers of a pod. So can pages of other
sites, through the user's browser. These measures keep them out:

- A token that cannot be guessed is required. It comes in the URL, and lets in one browser, once.
  From then on a cookie is required, which is another secret, and which no script can read.
- A request that says that it comes from a page of another origin is refused.
- A request for a name that an attacker's DNS resolves to 127.0.0.1 is refused by its Host header.
- Only GET is answered, and no other origin is ever allowed to read.
- The page runs only its own scripts, and uses only its own styles.

One risk remains: a cookie belongs to a host, whatever the port. The browser does not send it to
other sites, but sends it to any other server on 127.0.0.1 that its user opens. Whoever runs that
server can read the page with it until this process ends. The name of the cookie contains the port
that the browser asks, so that several pages do not overwrite each other's cookie.
"""

from __future__ import annotations

import html
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

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
