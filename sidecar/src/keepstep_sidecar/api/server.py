"""The routes: JSON in, one call to the service, JSON or a `Problem` out. Nothing else.

Types are those of `keepstep.wire.trainer`, decoded strictly by msgspec. A field that this version
does not know is ignored.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from keepstep.errors import KeepstepError
from keepstep.wire.trainer import (
    CandidatesRequest,
    ChunksRequest,
    DiscardRequest,
    FailedRequest,
    FlushRequest,
    HeadersRequest,
    LayoutRequest,
    LeaseNews,
    LeaseRequest,
    OpenRequest,
    OwnerRequest,
    Problem,
    RefusedRequest,
    ReleaseRequest,
    RestoredRequest,
    SkippedRequest,
    SlotRequest,
    SourcesRequest,
    StagedRequest,
    StopRequest,
    UncaughtRequest,
    UnseenRequest,
    WaitRequest,
    WarningRequest,
    WindowRequest,
)
from keepstep_sidecar.api.service import Service
from keepstep_sidecar.api.status import status, troubles
from keepstep_sidecar.concurrency import Tasks
from keepstep_sidecar.errors import answer, refuse
from keepstep_sidecar.leases import Lease

_LARGEST_REQUEST_BYTES = 256 << 20
"""The largest request is a layout's header in base64: a hundred bytes for each tensor."""

_PING_S = 10.0
_log = logging.getLogger("keepstep.sidecar")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def application(service: Service, tasks: Tasks) -> web.Application:
    """All routes of protocol version 1."""
    app = web.Application(client_max_size=_LARGEST_REQUEST_BYTES, middlewares=[_problems])
    routes = _Routes(service, tasks)
    app.add_routes(
        [
            web.post("/v1/lease", routes.lease),
            _post("/v1/unseen", UnseenRequest, service.unseen),
            _post("/v1/layout", LayoutRequest, service.saving.layout),
            _post("/v1/slot", SlotRequest, service.saving.slot),
            _post("/v1/staged", StagedRequest, service.saving.staged),
            _post("/v1/discard", DiscardRequest, service.saving.discard),
            _post("/v1/release", ReleaseRequest, service.saving.release),
            _post("/v1/skipped", SkippedRequest, service.saving.skipped),
            _post("/v1/failed", FailedRequest, service.restoring.failed),
            _post("/v1/warning", WarningRequest, service.saving.warning),
            _post("/v1/uncaught", UncaughtRequest, service.saving.uncaught_error),
            _post("/v1/refused", RefusedRequest, service.restoring.vote_refused),
            _post("/v1/candidates", CandidatesRequest, service.restoring.candidates),
            _post("/v1/restore", OpenRequest, service.restoring.open),
            _post("/v1/restored", RestoredRequest, service.restoring.restored),
            _post("/v1/sources", SourcesRequest, service.image_sources.sources),
            _post("/v1/headers", HeadersRequest, service.image_sources.headers),
            _post("/v1/window", WindowRequest, service.chunk_buffers.window),
            _post("/v1/chunks", ChunksRequest, service.chunk_buffers.chunks),
            _post("/v1/wait", WaitRequest, service.step_waits.wait),
            _post("/v1/flush", FlushRequest, service.flush),
            _post("/v1/owner", OwnerRequest, service.own),
            _post("/v1/stop", StopRequest, service.stop),
            web.get("/v1/status", routes.status),
            web.get("/v1/history", routes.history),
            *metric_routes(service),
        ]
    )
    return app


def public_application(service: Service) -> web.Application:
    """What the TCP port shows: nothing of the trainers' protocol, nothing that changes state."""
    app = web.Application(middlewares=[_problems])
    app.add_routes(metric_routes(service))
    return app


def metric_routes(service: Service) -> list[web.RouteDef]:
    """Metrics and health. Any answer shows that the process lives; `/healthz` also says whether it
    can do its work."""

    async def metrics(request: web.Request) -> web.Response:
        from keepstep_sidecar.api import metrics

        text = metrics.render(await status(service))
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(request: web.Request) -> web.Response:
        found = troubles(service)
        return web.Response(text="\n".join(found or ("ok",)) + "\n", status=503 if found else 200)

    return [web.get("/metrics", metrics), web.get("/healthz", healthz)]


def _post(path: str, kind: type[Any], call: Callable[[Any], Any]) -> web.RouteDef:
    """A route that decodes a `kind`, passes it to `call`, and encodes the result."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

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
        raise refuse("bad-request", f"{request.path}: {error}") from None


class _Routes:
    """The routes that need more than `_post` does."""

    def __init__(self, service: Service, tasks: Tasks) -> None:
        self._service = service
        self._tasks = tasks
        self._lease_decoder = msgspec.json.Decoder(LeaseRequest)

    async def lease(self, request: web.Request) -> web.StreamResponse:
        """Stream until the trainer's process ends, or its connection: then aiohttp cancels this."""
        service = self._service
        service.welcome()
        wanted = await _read(request, self._lease_decoder)
        lease, granted = await service.saving.lease(wanted, peer_pid=_peer_pid(request))
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
            await response.prepare(request)
            await response.write(msgspec.json.encode(granted) + b"\n")
            while not self._over(lease):
                warning = service.saving.unequal
                news = LeaseNews(warning="" if warning == lease.warned else warning)
                lease.warned = warning
                await response.write(msgspec.json.encode(news) + b"\n")
                await service.changes.until(
                    lambda: self._over(lease) or service.saving.unequal != lease.warned,
                    timeout_s=_PING_S,
                )
        except ConnectionResetError:
            _log.debug("a lease's connection is gone")
        finally:
            self._tasks.spawn(service.saving.ended(lease), f"lease of rank {lease.rank} ended")
        return response

    def _over(self, lease: Lease) -> bool:
        return lease.ended or lease.died or self._service.ending

    async def status(self, request: web.Request) -> web.Response:
        return _json(await status(self._service))

    async def history(self, request: web.Request) -> web.Response:
        """The events since a sequence number. Raises SidecarError `bad-request`."""
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= 18):
            raise refuse("bad-request", f"since={since[:80]!r}: expected an event's sequence")
        return _json(self._service.history.told(self._service.config.run, int(since)))


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into a `Problem`."""
    try:
        return await handler(request)
    except KeepstepError as error:
        status, problem = answer(error)
        return _json(problem, status=status)
    except web.HTTPException as error:
        problem = Problem(code="bad-request", message=f"{request.path}: {error.reason}")
        return _json(problem, status=error.status)
    except Exception as error:
        _log.exception("request failed", extra={"fields": {"route": request.path}})
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
