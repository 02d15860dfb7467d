"""The reports API: `POST /v1/reports`, and `/v1/certificates`, over HTTPS, for sidecars only.

Order matters: first who it is (the token), then which pod that is by our own record, then what it
says. Everything that is refused leaves as {code, message}, is counted, and is logged once per
source and reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec
from aiohttp import web

from keepstep.steps import EpochId, StepId
from keepstep.wire import certificates
from keepstep.wire.reports import PATH, Report, ReportedRank, ReportReply
from keepstep.wire.trainer import Problem
from keepstep_operator.api.model import PodRecord
from keepstep_operator.journal import crash, warn
from keepstep_operator.kube import PODS, Client, KubeError, NotFound
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.parsing import parse_pod_record
from keepstep_operator.reconcile.peer_certificates import PeerCertificates
from keepstep_operator.reconcile.state.actions import Action
from keepstep_operator.reconcile.state.node_rank import kept
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.token_auth import Identity, Refused, TokenAuth
from keepstep_operator.reconcile.writers.ratelimit import Throttle
from keepstep_operator.serving import Ready, health_routes

LARGEST_REPORT_BYTES: Final = 4 << 20
LARGEST_WORLD: Final = 65_536
MOST_RANKS: Final = 1024
"""That train on one pod, or of which it keeps copies. Of the archive a pod may tell for all."""
MOST_IMAGES: Final = 4096
"""Of one rank."""
MOST_EPOCHS: Final = 4096
MOST_RESTORES: Final = 16 * MOST_RANKS
MOST_VOLUMES: Final = 64
MOST_DEPOTS: Final = 64
LONGEST_ADDRESS: Final = 280
LARGEST_STEP: Final = 10**15
LARGEST_EPOCH: Final = 10**9
_HEX: Final = frozenset("0123456789abcdef")
_LOGGED_EVERY_S: Final = 600.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CarryOut = Callable[[Iterable[Action]], None]

_decode: Final = msgspec.json.Decoder(Report).decode
_decode_request: Final = msgspec.json.Decoder(certificates.CertificateRequest).decode
_encode: Final = msgspec.json.Encoder().encode


class ReportsApi:
    """Takes reports into the registry and answers from it. `carry_out` does what follows."""

    def __init__(
        self,
        registry: Registry,
        client: Client,
        *,
        tokens: TokenAuth,
        carry_out: CarryOut,
        metrics: Metrics,
        ready: Ready,
        clock: Callable[[], float],
        signing: PeerCertificates,
    ) -> None:
        self._registry = registry
        self._signing = signing
        self._client = client
        self._tokens = tokens
        self._carry_out = carry_out
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._logged = Throttle(burst=5, refill_s=_LOGGED_EVERY_S)

    def application(self) -> web.Application:
        """The routes, with every error as a `Problem`."""
        app = web.Application(client_max_size=LARGEST_REPORT_BYTES, middlewares=[self._problems])
        mine = [web.post(PATH, self._take), web.post(certificates.PATH, self._sign)]
        app.add_routes([*mine, *health_routes(self._ready)])
        return app

    async def _sender(self, request: web.Request) -> PodRecord:
        """The pod that asks, by its token and our own record. Raises Refused."""
        if reason := self._ready():
            raise Refused(503, "starting", reason)
        identity = await self._tokens.identify(_bearer(request))
        if (helper := self._registry.helpers.get(identity.pod_uid)) is not None:
            return helper
        pod = self._registry.pod(identity.pod_uid) or await self._look_up(identity)
        if pod.namespace != identity.namespace or not pod.injected:
            raise Refused(403, "not-injected", f"pod {pod.name} was not given this sidecar")
        return pod

    async def _sign(self, request: web.Request) -> web.Response:
        pod = await self._sender(request)
        return _json(self._signing.issue(pod, _decode_request(await request.read())))

    async def _take(self, request: web.Request) -> web.Response:
        pod = await self._sender(request)
        report = _checked(_decode(await request.read()))
        reply = self._answer(pod, report)
        self._metrics.reports.inc()
        return _json(reply)

    def _answer(self, pod: PodRecord, report: Report) -> ReportReply:
        try:
            self._carry_out(self._registry.reported(pod.uid, report, at=self._clock()))
            return self._registry.reply(pod.uid, at=self._clock())
        except KeyError:  # deleted while its report was read
            raise Refused(404, "unknown-pod", f"pod {pod.name} is gone") from None

    async def _look_up(self, identity: Identity) -> PodRecord:
        """A pod that the watch has not shown yet: the sidecar may be faster."""
        try:
            body = await self._client.get(PODS, identity.pod_name, namespace=identity.namespace)
        except NotFound:
            raise Refused(404, "unknown-pod", f"there is no pod {identity.pod_name}") from None
        except KubeError as error:
            raise Refused(503, "unavailable", f"the pod cannot be looked up: {error}") from error
        pod = parse_pod_record(body)
        if pod is None or not pod.injected:
            raise Refused(403, "not-injected", f"pod {identity.pod_name} has no sidecar of ours")
        if pod.uid != identity.pod_uid:
            message = f"the token is of an earlier pod {identity.pod_name}"
            raise Refused(403, "other-pod", message)
        self._carry_out(self._registry.pod_seen(pod, at=self._clock()))
        return pod

    @web.middleware
    async def _problems(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return self._refuse(request, refused)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._refuse(request, Refused(400, "bad-report", str(error)))
        except web.HTTPException as error:
            return self._refuse(request, Refused(error.status, "bad-request", error.reason))
        except Exception:
            crash("report failed", source=request.remote)
            return _json(
                Problem(code="internal", message="the operator failed; its log says why"),
                status=500,
            )

    def _refuse(self, request: web.Request, refused: Refused) -> web.Response:
        self._metrics.refused.labels(refused.code).inc()
        source = request.remote or "?"
        if self._logged.allows(source, refused.code, period_s=_LOGGED_EVERY_S, at=self._clock()):
            warn("report refused", source=source, code=refused.code, reason=str(refused))
        return _json(Problem(code=refused.code, message=str(refused)), status=refused.status)


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _checked(report: Report) -> Report:
    """Bounds on what a pod may make us remember, compute and write. Raises Refused."""
    held = sum(bool(one.peer) or not kept(one) for one in report.ranks)
    if held > MOST_RANKS or len(report.ranks) > LARGEST_WORLD or len(report.epochs) > MOST_EPOCHS:
        raise Refused(400, "bad-report", "more ranks or epochs than one pod can have")
    if len(report.restores) > MOST_RESTORES or len(report.volumes) > MOST_VOLUMES:
        raise Refused(400, "bad-report", "more restores or volumes than one pod can have")
    if len(report.depots) > MOST_DEPOTS or len(report.peer_address) > LONGEST_ADDRESS:
        raise Refused(400, "bad-report", "more depots, or a longer address, than one pod can have")
    epochs = [*report.epochs, *(one.epoch for one in report.restores)]
    parents = [one.parent for one in epochs if one.parent is not None]
    if not all(map(_is_epoch, (one.id for one in epochs))) or not all(map(_is_step, parents)):
        raise Refused(400, "bad-report", "an epoch that cannot be")
    for one in report.ranks:
        _check_rank(one)
    return report


def _check_rank(one: ReportedRank) -> None:
    held = (*one.memory, *one.local, *one.peer, *one.archive)
    worlds = {one.world, *(image.world for image in held)}
    if any(not all(0 <= twin < image.world for twin in image.twins) for image in held):
        raise Refused(400, "bad-report", f"rank {one.rank} tells of twins that cannot be")
    if not 0 <= one.rank < one.world or not all(0 < world <= LARGEST_WORLD for world in worlds):
        raise Refused(400, "bad-report", f"rank {one.rank} of {one.world} cannot be")
    if len(held) > MOST_IMAGES:
        raise Refused(400, "bad-report", f"rank {one.rank} tells of too many images")
    staged = (one.staged,) if one.staged is not None else ()
    if not all(map(_is_step, (*staged, *(image.id for image in held)))):
        raise Refused(400, "bad-report", f"rank {one.rank} tells of a step that cannot be")


def _is_step(id: StepId) -> bool:
    return 0 <= id.step < LARGEST_STEP and _is_epoch(id.epoch)


def _is_epoch(id: EpochId) -> bool:
    """As `EpochId.parse` reads it back from a status or a directory's name."""
    return 0 <= id.number < LARGEST_EPOCH and len(id.nonce) == 8 and set(id.nonce) <= _HEX


def _json(value: object, *, status: int = 200) -> web.Response:
    """An answer, and the end of its connection: an open TLS connection holds 300 KiB, which is
    600 MiB for 2,000 sidecars; a handshake costs less than a millisecond."""
    response = web.Response(body=_encode(value), status=status, content_type="application/json")
    response.force_close()
    return response
