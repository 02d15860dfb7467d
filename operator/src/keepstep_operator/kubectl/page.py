"""The page of a cluster on this machine: requests of a browser are passed on to the page's pod.

The browser is admitted as by `keepstep ui` (a token in the URL, a cookie from then on, no other
host name and no other origin). It never gets the viewer's own token. This is added to the requests
to the pod, which go through the API server and through no port of this machine, where others could
listen.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from aiohttp import web

from keepstep.errors import UsageError
from keepstep_operator import names
from keepstep_operator.kubectl.cluster import Cluster, Refused
from keepstep_page.access import HOST, Access, sign
from keepstep_page.server import on_loopback

_AT_ONCE: Final = 64
"""The most requests at a time. Each open page is one."""
_CHUNK: Final = 64 << 10
_ANSWERS_S: Final = 30.0
_SILENT_S: Final = 60.0
"""An open page gets data more often than this."""
_ACCOUNT_S: Final = 3600
"""The life of a service account's token. A new one is made after two thirds of it."""


class Upstream:
    """The page in pod `pod` of `namespace`. `token`: returns the viewer's present token; may
    block."""

    def __init__(
        self, cluster: Cluster, namespace: str, pod: str, token: Callable[[], str]
    ) -> None:
        self._cluster, self._namespace, self._pod, self._token = cluster, namespace, pod, token

    def ask(self, path: str) -> Answer:
        """GET `path`. Blocks. Raises Refused if the pod cannot be reached, and UsageError without a
        token."""
        wire = self._cluster.open_port(self._namespace, self._pod, names.UI_PORT)
        wire.settimeout(_ANSWERS_S)
        connection = http.client.HTTPConnection(HOST, names.UI_PORT)
        connection.sock = wire
        headers = {
            "Authorization": f"Bearer {self._token()}",
            names.UI_NAMESPACE_HEADER: self._cluster.namespace,
        }
        try:
            connection.request("GET", path, headers=headers)
            return Answer(wire, connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            wire.close()
            place = f"{self._namespace}/{self._pod}"
            said = f"the page in pod {place} does not answer ({error}); see its log"
            raise Refused(said, code=0) from error


class Answer:
    """An answer whose body is read as it arrives."""

    def __init__(self, wire: socket.socket, response: http.client.HTTPResponse) -> None:
        self._wire, self._response = wire, response
        self.status = response.status
        self.kind = response.headers.get("Content-Type", "text/plain")
        length = response.headers.get("Content-Length")
        self.length = None if length is None else int(length)
        wire.settimeout(_SILENT_S)

    def more(self) -> bytes:
        """The next part of the body; b'' at the end. Blocks."""
        try:
            return self._response.read1(_CHUNK)
        except (OSError, http.client.HTTPException):
            return b""

    def end(self) -> None:
        """Close the connection. This also ends a blocked `more`."""
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()


def account_token(cluster: Cluster, account: str) -> Callable[[], str]:
    """Returns a function for the token of a service account of the namespace. The token is made for
    the page and for nothing else."""
    known, until = "", 0.0

    def token() -> str:
        nonlocal known, until
        if time.monotonic() >= until:
            known = cluster.token_of(account, audience=names.UI_AUDIENCE, seconds=_ACCOUNT_S)
            until = time.monotonic() + _ACCOUNT_S * 2 / 3
        return known

    return token


@asynccontextmanager
async def serving(upstream: Upstream, *, port: int) -> AsyncIterator[str]:
    """Serve the page on this machine; yields its URL. `port` 0: any free port. Raises UsageError if
    it cannot have the port, and the errors of `Upstream.ask` if there is no page to show."""
    threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="keepstep-ui")
    loop = asyncio.get_running_loop()

    async def asked(path: str) -> Answer:
        """`Upstream.ask`; if it is cancelled, the answer is closed when it comes."""
        asking = loop.run_in_executor(threads, upstream.ask, path)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_end)
            raise

    async def show(request: web.Request) -> web.StreamResponse:
        try:
            # without the query, which has our token
            answer = await asked(request.rel_url.raw_path)
        except (Refused, UsageError) as error:
            return web.Response(status=502, text=f"{error}\n")
        try:
            response = web.StreamResponse(status=answer.status)
            response.headers["Content-Type"] = answer.kind
            response.content_length = answer.length
            await response.prepare(request)
            while chunk := await loop.run_in_executor(threads, answer.more):
                await response.write(chunk)
        finally:
            answer.end()
        return response

    access = Access("kubectl keepstep ui")
    app = web.Application(middlewares=[access.middleware()])
    app.on_response_prepare.append(sign)
    app.router.add_get("/{path:.*}", show, allow_head=False)
    try:
        (await asked("/static/icon.svg")).end()
        async with on_loopback(app, port) as bound:
            yield access.url(bound)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _end(asking: Any) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().end()
