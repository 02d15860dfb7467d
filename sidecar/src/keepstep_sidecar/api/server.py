"""The routes, and where they are served: on the trainers' socket, and on TCP ports for metrics and
the page.

A route is JSON in, one call to the service, JSON or a `Problem` out, and nothing else. Types are
those of `keepstep.wire.trainer`, decoded strictly by msgspec. A field that this version does not
know is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from aiohttp import web

from keepstep.errors import KeepstepError
from keepstep.wire.trainer import LeaseRequest, LeaseStreamEvent, Problem
from keepstep_sidecar import unauthenticated_connections
from keepstep_sidecar.api.sidecar_service import SidecarService
from keepstep_sidecar.api.status import collect_status, troubles
from keepstep_sidecar.concurrency import Tasks
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.error_responses import problem_of, refusal_error
from keepstep_sidecar.leases import Lease
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.memory.slot_directories import DirectoryLock, clear_path

# --- routes ----------------------------------------------------------------------------------


_LARGEST_REQUEST_BYTES = 256 << 20
"""The largest request is a layout's header in base64: a hundred bytes for each tensor."""

_PING_S = 10.0
_log = logging.getLogger("keepstep.sidecar")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def application(service: SidecarService, tasks: Tasks) -> web.Application:
    """All routes of protocol version 1."""
    app = web.Application(client_max_size=_LARGEST_REQUEST_BYTES, middlewares=[_problems])
    routes = _Routes(service, tasks)
    app.add_routes(
        [
            web.post("/v1/lease", routes.lease),
            _post("/v1/unseen", service.unseen),
            _post("/v1/layout", service.saving.layout),
            _post("/v1/slot", service.saving.slot),
            _post("/v1/staged", service.saving.staged),
            _post("/v1/discard", service.saving.discard),
            _post("/v1/release", service.saving.release),
            _post("/v1/skipped", service.saving.skipped),
            _post("/v1/failed", service.restoring.failed),
            _post("/v1/warning", service.saving.warning),
            _post("/v1/uncaught", service.saving.on_uncaught_error),
            _post("/v1/refused", service.restoring.record_refused_vote),
            _post("/v1/candidates", service.restoring.candidates),
            _post("/v1/restore", service.restoring.load_step_into_slot),
            _post("/v1/restored", service.restoring.restored),
            _post("/v1/sources", service.image_sources.list_rank_sources),
            _post("/v1/headers", service.image_sources.headers),
            _post("/v1/window", service.chunk_buffers.make_window),
            _post("/v1/chunks", service.chunk_buffers.fetch_chunks),
            _post("/v1/wait", service.step_waits.wait),
            _post("/v1/flush", service.flush_for_shutdown),
            _post("/v1/owner", service.register_owner),
            _post("/v1/pin", service.pinning.pin),
            _post("/v1/stop", service.stop),
            web.get("/v1/status", routes.status),
            web.get("/v1/history", routes.history),
            *metric_routes(service),
        ]
    )
    return app


def public_application(service: SidecarService) -> web.Application:
    """What the TCP port shows: nothing of the trainers' protocol, nothing that changes state."""
    app = web.Application(middlewares=[_problems])
    app.add_routes(metric_routes(service))
    return app


def metric_routes(service: SidecarService) -> list[web.RouteDef]:
    """Metrics and health. Any answer shows that the process lives; `/healthz` also says whether it
    can do its work."""

    async def metrics(request: web.Request) -> web.Response:
        from keepstep_sidecar.api import metrics

        text = metrics.render_metrics(await collect_status(service))
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(request: web.Request) -> web.Response:
        found = troubles(service)
        return web.Response(text="\n".join(found or ("ok",)) + "\n", status=503 if found else 200)

    return [web.get("/metrics", metrics), web.get("/healthz", healthz)]


def _post(path: str, call: Callable[[Any], Any]) -> web.RouteDef:
    """A route that decodes the `request` of `call`, passes it on, and encodes the result."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(get_type_hints(call)["request"])

    async def handle(request: web.Request) -> web.Response:
        result = call(await _read(request, decoder))
        if isinstance(result, Awaitable):
            result = await result
        return _json(result if result is not None else {})

    return web.post(path, handle)


async def _read(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The request's body. Raises SidecarError `bad-request`."""
    data = await request.read()
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # a DecodeError, or not UTF-8, or too deep
        raise refusal_error("bad-request", f"{request.path}: {error}") from None


class _Routes:
    """The routes that need more than `_post` does."""

    def __init__(self, service: SidecarService, tasks: Tasks) -> None:
        self._service = service
        self._tasks = tasks
        self._lease_decoder = msgspec.json.Decoder(LeaseRequest)

    async def lease(self, request: web.Request) -> web.StreamResponse:
        """Stream until the trainer's process ends, or its connection: then aiohttp cancels this."""
        service = self._service
        service.admit_trainer()
        body = await _read(request, self._lease_decoder)
        lease, granted = await service.saving.lease(body, peer_pid=_peer_pid(request))
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
            await response.prepare(request)
            await response.write(msgspec.json.encode(granted) + b"\n")
            while not self._over(lease):
                warning = service.saving.unequal
                news = LeaseStreamEvent(warning="" if warning == lease.warned else warning)
                lease.warned = warning
                await response.write(msgspec.json.encode(news) + b"\n")
                await service.changes.until(
                    lambda: self._over(lease) or service.saving.unequal != lease.warned,
                    timeout_s=_PING_S,
                )
        except ConnectionResetError:
            info("trainer.connection_lost", level=logging.DEBUG, rank=lease.rank)
        finally:
            self._tasks.spawn(
                service.saving.end_trainer_lease(lease), f"lease of rank {lease.rank} ended"
            )
        return response

    def _over(self, lease: Lease) -> bool:
        return lease.ended or lease.died or self._service.ended.is_set()

    async def status(self, request: web.Request) -> web.Response:
        return _json(await collect_status(self._service))

    async def history(self, request: web.Request) -> web.Response:
        """The events since a sequence number. Raises SidecarError `bad-request`."""
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= 18):
            raise refusal_error(
                "bad-request", f"since={since[:80]!r}: expected an event's sequence"
            )
        return _json(self._service.history.history_page(self._service.config.run, int(since)))


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into a `Problem`."""
    try:
        return await handler(request)
    except KeepstepError as error:
        status, problem = problem_of(error)
        return _json(problem, status=status)
    except web.HTTPException as error:
        problem = Problem(code="bad-request", message=f"{request.path}: {error.reason}")
        return _json(problem, status=error.status)
    except Exception as error:
        _log.exception("api.request_crashed", extra={"fields": {"path": request.path}})
        problem = Problem(code="internal", message=f"{type(error).__name__}: {error}")
        return _json(problem, status=500)


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def _peer_pid(request: web.Request) -> int:
    """The trainer's process id as the kernel tells it; 0 when it is in another pid namespace, as in
    a pod (unix(7), pid_namespaces(7))."""
    assert request.transport is not None
    peer = request.transport.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


# --- sockets ---------------------------------------------------------------------------------


_SHUTDOWN_S = 3.0
_WATCH_S = 1.0
_LISTEN_AGAIN_S = 5.0
_PAUSE_S = 1.0
"""Between two pages: a page that cannot start must not keep a core busy."""
_MOST_SCRAPES, _SCRAPE_S = 16, 10.0
"""Connections to the metrics port, and how long each may last: anyone can open them."""


class _Door:
    """The trainers' socket: the server that listens, and its path."""

    def __init__(self, runner: web.AppRunner, path: Path) -> None:
        self._runner = runner
        self._path = path
        self._site: web.UnixSite | None = None
        self._made: os.stat_result | None = None

    async def open(self) -> None:
        """Listen under a new socket file. Open connections stay as they are. Raises OSError."""
        if self._site is not None:
            await self._site.stop()
        clear_path(self._path)
        self._site = web.UnixSite(self._runner, str(self._path))
        await self._site.start()
        with contextlib.suppress(FileNotFoundError):  # removed at once: it will be made again
            self._made = self._path.lstat()

    @property
    def there(self) -> bool:
        """Whether the path still leads to this socket. Raises OSError when that is unknown."""
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return False
        return self._made is not None and os.path.samestat(self._made, found)


async def _watch(service: SidecarService, lock: DirectoryLock, door: _Door) -> None:
    """Make again what other processes removed: the memory directory, the socket, slots."""
    trouble = ""
    while not service.ending:
        await asyncio.sleep(_WATCH_S)
        try:
            if not (service.ending or (lock.held and door.there)):
                warn("socket.removed", path=str(service.config.socket))
                lock.take()
                await door.open()
                info("socket.recreated")
            await service.repair_memory()
            trouble = ""
        except (KeepstepError, OSError) as error:
            if str(error) != trouble:
                warn("memory.recreate_failed", error=str(error))
            trouble = str(error)


async def serve_until_stopped(service: SidecarService, tasks: Tasks, lock: DirectoryLock) -> None:
    """Serve the socket (and metrics over TCP) until the service ends."""
    runner, public = (
        web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        for app in (application(service, tasks), public_application(service))
    )
    await runner.setup()
    await public.setup()
    if (port := service.config.metrics_port) is not None:
        listening = _listening(port, service)
        tasks.spawn(_serve_metrics(public, listening, port, service), "serve metrics")
    _offer_page(service.config, tasks)
    door = _Door(runner, service.config.socket)
    await door.open()
    tasks.spawn_with_retries(functools.partial(_watch, service, lock, door), "watch memory")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: tasks.spawn(service.terminate(), "terminate"))
    info("sidecar.started", socket=str(service.config.socket), pid=os.getpid())
    try:
        await service.ended.wait()
    finally:
        await runner.cleanup()
        await public.cleanup()
        info("sidecar.stopped")


async def _serve_metrics(
    runner: web.AppRunner, listening: socket.socket | None, port: int, service: SidecarService
) -> None:
    """Serve metrics until cancelled. A port that is taken, maybe by the training script, is tried
    again: nothing else waits for it."""
    while listening is None:
        await asyncio.sleep(_LISTEN_AGAIN_S)
        listening = _listening(port, service)
    strangers: unauthenticated_connections.UnauthenticatedConnections[asyncio.Transport] = (
        unauthenticated_connections.UnauthenticatedConnections(
            lambda transport: transport.abort(),
            most=_MOST_SCRAPES,
            most_each=_MOST_SCRAPES // 2,
            seconds=_SCRAPE_S,
        )
    )
    assert runner.server is not None
    await unauthenticated_connections.serve_connections(runner.server, listening, strangers)


def _listening(port: int, service: SidecarService) -> socket.socket | None:
    """A socket that listens on the port; None if it cannot be opened, which the warnings say."""
    try:
        listening = unauthenticated_connections.listen_on_all(port)
    except OSError as error:
        if not service.no_metrics:
            warn("metrics.port_unavailable", port=port, error=str(error))
        reason = os.strerror(error.errno or 0)
        service.no_metrics = (
            f"no metrics are served, since port {port} cannot be opened ({reason}); it tries again."
            " If the training script uses that port, choose another one (sidecar.ports.metrics of"
            " the policy, --metrics-port)"
        )
        return None
    if service.no_metrics:
        info("metrics.port_opened", port=port)
    service.no_metrics = ""
    return listening


def _offer_page(config: Config, tasks: Tasks) -> None:
    """Listen on `config.ui_port` of the loopback, and start the page when somebody connects.

    The page is a process of its own (`keepstep-sidecar page`), so that neither its work nor its
    faults are the sidecar's. It inherits the listening socket and ends by itself when it is not
    used. A port that is taken is only logged: training must not fail over a page.
    """
    if config.ui_port is None:
        return
    try:
        listening = socket.create_server(("127.0.0.1", config.ui_port))
    except OSError as error:
        warn("page.port_unavailable", port=config.ui_port, error=str(error))
        return
    tasks.spawn_with_retries(functools.partial(_serve_page, listening, config), "serve page")


async def _serve_page(listening: socket.socket, config: Config) -> None:
    loop, connected = asyncio.get_running_loop(), asyncio.Event()
    while True:
        connected.clear()
        loop.add_reader(listening, connected.set)
        try:
            await connected.wait()  # the page accepts the connection
        finally:
            loop.remove_reader(listening)
        await _show(listening.fileno(), config)
        await asyncio.sleep(_PAUSE_S)


async def _show(fd: int, config: Config) -> None:
    """Run the page on the listening socket `fd` until it ends."""
    words = ("page", "--run", config.run, "--memory-dir", str(config.memory_dir), "--fd", str(fd))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "keepstep_sidecar", *words,
        stdin=asyncio.subprocess.DEVNULL, pass_fds=(fd,),
    )  # fmt: skip
    try:
        if code := await process.wait():
            warn("page.crashed", exit_code=code)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
