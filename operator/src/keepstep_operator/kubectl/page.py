"""The page of a run on this machine: a port of its pod, forwarded.

Nothing of a request is looked at here. The page lets in a browser that has a token; this module
fetches a token from it, by the UID of the pod. No token of the cluster leaves this process but to
the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from keepstep.errors import UsageError
from keepstep_operator import names
from keepstep_operator.kubectl.cluster import ApiRefusal, Cluster
from keepstep_operator.object_body import Body

HOST: Final = "127.0.0.1"
_ENTRY: Final = "/entry"
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_AT_ONCE: Final = 64
"""The most connections at a time. Each is one to the API server."""
_CHUNK: Final = 64 << 10
_ANSWERS_S: Final = 30.0


class ForwardedPage:
    """The page that the sidecar of `pod`, an object of the API, serves."""

    def __init__(self, cluster: Cluster, pod: Body) -> None:
        self._cluster = cluster
        self.pod, self._uid = str(pod["metadata"]["name"]), str(pod["metadata"]["uid"])
        self._port = _port_of(pod)

    def open(self) -> socket.socket:
        """A connection to the page. Blocks. Raises ApiRefusal."""
        return self._cluster.open_port(self.pod, self._port)

    @contextlib.contextmanager
    def hold_entry_token(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """A token that lets in one browser, once, and a function that blocks until the page has
        ended. The page does not end by itself while this context is open. Blocks. Raises
        ApiRefusal."""
        connection = http.client.HTTPConnection(HOST, self._port)
        connection.sock = wire = self.open()
        wire.settimeout(_ANSWERS_S)
        with wire, contextlib.closing(connection):
            try:
                headers = {"Authorization": f"Bearer {self._uid}"}
                connection.request("GET", _ENTRY, headers=headers)
                answer = connection.getresponse()
                text = answer.readline(1024).decode(errors="replace").strip()
            except (OSError, http.client.HTTPException) as error:
                raise self._none(f"it does not answer ({error})") from error
            if answer.status != 200 or not _TOKEN.fullmatch(text):
                raise self._none(f"it says {answer.status}: {text[:200]}")

            def until_end() -> None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    while answer.readline(1024):
                        pass

            try:
                yield text, until_end
            finally:
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)  # ends `until_end`

    def _none(self, reason: str) -> ApiRefusal:
        return ApiRefusal(
            f"no page in pod {self.pod}: {reason}; kubectl logs -c keepstep-sidecar shows what it"
            " wrote. On the host's network, one pod of each node has a page"
        )


def _port_of(pod: Body) -> int:
    containers = [*pod["spec"].get("initContainers", ()), *pod["spec"].get("containers", ())]
    for container in containers:
        if container["name"] == names.SIDECAR_CONTAINER:
            for variable in container.get("env", ()):
                if variable["name"] == names.UI_PORT_ENV:
                    return int(variable["value"])
    raise UsageError(
        f"the sidecar of pod {pod['metadata']['name']} serves no page: a container of the pod uses"
        f" port {names.SIDECAR_UI_PORT}, or an older operator injected it"
    )


async def serve(page: ForwardedPage, *, port: int, run: str, report: Callable[[str], None]) -> None:
    """Forward a port of this machine to the page until SIGINT or SIGTERM. `port` 0: any free one.
    Raises UsageError if it cannot have the port, ApiRefusal if there is no page."""
    ended = asyncio.Event()
    with page.hold_entry_token() as (token, until_end):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with _forwarding(page, port, report) as bound:
            report(f"run {run}: http://{HOST}:{bound}/runs/{run}?token={token}\n(Ctrl-C ends it)")
            gone = asyncio.create_task(asyncio.to_thread(until_end))
            interrupted = asyncio.create_task(ended.wait())
            await asyncio.wait({gone, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    interrupted.cancel()
    if not ended.is_set():
        raise ApiRefusal(f"the page in pod {page.pod} has ended; start this command again")


@contextlib.asynccontextmanager
async def _forwarding(
    page: ForwardedPage, port: int, report: Callable[[str], None]
) -> AsyncIterator[int]:
    """Forward connections to `port` of this machine; yields the port. Raises UsageError."""
    connected = set[asyncio.Task[None]]()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connected.add(task)
        try:
            if len(connected) <= _AT_ONCE:
                await _forward(page, reader, writer, report=report)
        finally:
            connected.discard(task)
            writer.close()

    try:
        server = await asyncio.start_server(accepted, HOST, port)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {HOST}:{port} ({error.strerror or error}); choose another --port"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connected:
            task.cancel()
        await asyncio.gather(*connected, return_exceptions=True)


async def _forward(
    page: ForwardedPage,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    report: Callable[[str], None],
) -> None:
    """Pass bytes on in both directions until one side ends."""
    try:
        wire = await asyncio.to_thread(page.open)
    except ApiRefusal as error:
        report(str(error))
        return
    pod_reader, pod_writer = await asyncio.open_connection(sock=wire)
    passing = {
        asyncio.create_task(_pass(reader, pod_writer)),
        asyncio.create_task(_pass(pod_reader, writer)),
    }
    try:
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
        pod_writer.close()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
