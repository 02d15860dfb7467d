"""Decides who may read the page: the user who was given its URL, in a browser on this machine.

Other users of the machine can reach the port. So can pages of other sites, through the user's
browser. These measures keep them out:

- A token that cannot be guessed is required. It comes in the URL once. From then on it is a cookie,
  which no script can read.
- A request that says that it comes from a page of another origin is refused.
- A request for a name that an attacker's DNS resolves to 127.0.0.1 is refused by its Host header.
- Only GET is answered, and no other origin is ever allowed to read.
- The page runs only its own scripts, and uses only its own styles.

One risk remains: a cookie belongs to a host, whatever the port. The browser does not send it to
other sites, but sends it to any other server on 127.0.0.1 that its user opens. Whoever runs that
server can read the page with it until this process ends. The name of the cookie contains the port,
so that several of these processes do not overwrite each other's cookie.
"""

from __future__ import annotations

import secrets
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

HOST: Final = "127.0.0.1"
_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""The host names under which the page answers. `ssh -L` may change the port, but never the name."""

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
    '<meta http-equiv="refresh" content="0; url=/"><p><a href="/">keepstep</a></p></html>'
)
"""This page is not a redirect, because a redirect after a link on another site would not carry the
cookie.
"""


class Access:
    """The access to one page by one token, which is new for each process. `command`: the command
    that printed the URL.
    """

    def __init__(self, command: str) -> None:
        self._token = secrets.token_urlsafe(32)
        self._command = command

    def url(self, port: int) -> str:
        """The URL that is printed for the user who may read the page."""
        return f"http://{HOST}:{port}/?token={self._token}"

    def middleware(self) -> Middleware:
        """Checks every request before its route runs."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = self._refusal(request) or self._entry(request)
            return await handler(request) if answer is None else answer

        return guarded

    def _refusal(self, request: web.Request) -> web.Response | None:
        if (answer := only_get(request)) is not None:
            return answer
        if _host_of(request) not in _NAMES:
            return _refused(421, f"ask for {HOST} or localhost: this page has no other name")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{request.headers['Host']}":
            return _refused(403, "this page is not for pages of other origins")
        return None

    def _entry(self, request: web.Request) -> web.Response | None:
        """None for a request with the cookie; a page that sets the cookie for a request with the
        token; else a refusal.
        """
        cookie = _cookie_name(request)
        if self._is_token(request.cookies.get(cookie, "")):
            return None
        if not self._is_token(request.query.get("token", "")):
            why = f"open the URL that `{self._command}` printed: it has a token in it"
            return _refused(403, why)
        response = web.Response(text=_WELCOME, content_type="text/html")
        response.set_cookie(cookie, self._token, httponly=True, samesite="Strict", path="/")
        return response

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(errors="surrogateescape"), self._token.encode())


def only_get(request: web.Request) -> web.Response | None:
    """The refusal of a request that is not GET; None for GET."""
    if request.method == "GET":
        return None
    text = "this page is read, nothing else: only GET is answered\n"
    return web.Response(status=405, text=text, headers={"Allow": "GET"})


async def sign(_: web.Request, response: web.StreamResponse) -> None:
    """Put the headers on every answer, including errors of the routes; see
    `on_response_prepare`.
    """
    response.headers.update(_HEADERS)
    response.headers.pop("Server", None)


def _host_of(request: web.Request) -> str:
    """The name in the Host header, without its port."""
    host = request.headers.get("Host", "")
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _cookie_name(request: web.Request) -> str:
    """The name of the cookie, with the port of this server. Cookies ignore ports, and two of these
    processes on one machine must not share a name.
    """
    transport = request.transport
    name = None if transport is None else transport.get_extra_info("sockname")
    return f"keepstep-ui-{name[1] if name else 0}"


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n")
