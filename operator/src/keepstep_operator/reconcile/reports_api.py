"""The reports API: `POST /v1/reports` and `/v1/certificates`, over HTTPS, for sidecars only.

The order matters: first the token says which pod asks, then our own record says what pod that is,
and only then its body is read. Every refused request is answered with {code, message}, counted, and
logged once per source and reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from keepstep.wire.reports import CERTIFICATES_PATH, PATH, CertificateRequest
from keepstep.wire.trainer import Problem
from keepstep_operator.api.model import PodRecord
from keepstep_operator.connections import SERVED
from keepstep_operator.journal import crash, warn
from keepstep_operator.kube import PODS, Client, KubeError, NotFound
from keepstep_operator.reconcile import report_body
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.parsing import parse_pod_record
from keepstep_operator.reconcile.peer_certificates import PeerCertificates, of_agent, of_pod
from keepstep_operator.reconcile.ratelimit import Buckets, Throttle
from keepstep_operator.reconcile.state.actions import Action
from keepstep_operator.reconcile.state.registry import BUDGET, Registry
from keepstep_operator.reconcile.token_auth import Identity, Refused, TokenAuth
from keepstep_operator.reconcile.turns import Parts, Turns
from keepstep_operator.serving import Ready, body_of, health_routes

LARGEST_REPORT_BYTES: Final = 4 << 20
_LARGEST_REQUEST_BYTES: Final = 64 << 10
"""The largest body of a request for a certificate: `LARGEST_REQUEST` as JSON."""
_LOGGED_EVERY_S: Final = 600.0
_READ_S: Final = 20.0
_EARLY: Final = 0.8
"""A report may come after this part of the gap that the last reply asked for, because clocks and
networks are not exact."""
_REPORTS_AT_ONCE: Final = 5.0
"""How many reports one pod may send at once: a sidecar that starts or ends has several."""
MOST_READ: Final = SERVED // 4
"""How many bodies of one namespace are read at a time."""
_WORK_AT_ONCE_S: Final = 3.0
"""The seconds of work that one namespace may ask for at once. After that it has `BUDGET` of a core,
as much as all namespaces together should need."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CarryOut = Callable[[Iterable[Action]], None]
T = TypeVar("T")

_decode_request: Final = msgspec.json.Decoder(CertificateRequest).decode
_encode: Final = msgspec.json.Encoder().encode


class ReportsApi:
    """Takes reports into the registry and answers from it. `carry_out`: does what follows from a
    report. `authorities`: by which clients are to recognize this server."""

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
        shown: Callable[[str], None],
        authorities: Callable[[], str],
    ) -> None:
        self._registry = registry
        self._signing = signing
        self._shown = shown
        self._authorities = authorities
        self._client = client
        self._tokens = tokens
        self._carry_out = carry_out
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._logged = Throttle(burst=5, refill_s=_LOGGED_EVERY_S)
        self._pace = Buckets[str](burst=_REPORTS_AT_ONCE, refill_s=1.0)
        self._budget = Buckets[str](burst=_WORK_AT_ONCE_S, refill_s=1.0 / BUDGET)
        self._turns = Turns(self._budget.spend)
        self._reading: Counter[str] = Counter()

    def application(self) -> web.Application:
        """The application. Every error is answered with a `Problem`."""
        app = web.Application(middlewares=[self._ends])
        mine = [web.post(PATH, self._take), web.post(CERTIFICATES_PATH, self._sign)]
        app.add_routes([*mine, *health_routes(self._ready)])
        return app

    async def _pod(self, identity: Identity) -> PodRecord:
        """The pod of this token, by our own record. Raises Refused."""
        pod = self._registry.pod(identity.pod_uid) or await self._look_up(identity)
        if pod.namespace != identity.namespace or not pod.injected:
            raise Refused(403, "not-injected", f"pod {pod.name} was not given this sidecar")
        if reason := self._registry.refusal(pod.uid):
            raise Refused(403, "run-taken", reason)
        return pod

    async def _identity(self, request: web.Request) -> Identity:
        """Whose token came with the request. Raises Refused."""
        if reason := self._ready():
            raise Refused(503, "starting", reason)
        return await self._tokens.identify(_bearer(request), source=request.remote or "?")

    async def _sign(self, request: web.Request) -> web.Response:
        """Sign a certificate for a sidecar, or for the agent of a node. Each needs one a day;
        further ones use up the budget that its namespace has for reports."""
        identity = await self._identity(request)
        agent = self._registry.agent(identity.pod_uid)
        namespace = identity.namespace
        uri = of_agent(agent) if agent is not None else of_pod(await self._pod(identity))
        self._require_budget(namespace)
        if not 0 < (request.content_length or 0) <= _LARGEST_REQUEST_BYTES:
            raise Refused(413, "bad-request", "this is no certificate request")
        with self._one_of_few(namespace):
            body = await _body(request)
        return await self._turns.work(self._signed(uri, namespace, body), tenant=namespace)

    def _signed(self, uri: str, namespace: str, body: bytes) -> Parts[web.Response]:
        self._require_budget(namespace)
        yield
        return _json(self._signing.issue(uri, _decode_request(body)))

    async def _take(self, request: web.Request) -> web.Response:
        pod = await self._pod(await self._identity(request))
        self._require_pace(pod)
        with self._one_of_few(pod.namespace):
            body = await _body(request)
        reply = await self._turns.work(self._parts(pod, body), tenant=pod.namespace)
        self._metrics.reports.inc()
        return reply

    def _parts(self, pod: PodRecord, body: bytes) -> Parts[web.Response]:
        self._require_budget(pod.namespace)  # others used it up while this one was read
        report = yield from report_body.read(body)
        yield
        with _known(pod):
            self._carry_out(self._registry.reported(pod.uid, report, at=self._clock()))
        yield
        with _known(pod):
            told = self._registry.reply(pod.uid, holds=report.peers_version, at=self._clock())
            return _json(replace(told, authorities=self._authorities()))

    @contextmanager
    def _one_of_few(self, namespace: str) -> Iterator[None]:
        """Counts the bodies of a namespace that are being read. Raises Refused if they are so many
        that slow ones could take all connections of the listener."""
        if self._reading[namespace] >= MOST_READ:
            message = f"{MOST_READ} requests of namespace {namespace} are on their way already"
            raise Refused(429, "busy", f"{message}; come again later")
        self._reading[namespace] += 1
        try:
            yield
        finally:
            self._reading[namespace] -= 1
            if not self._reading[namespace]:
                del self._reading[namespace]

    def _require_pace(self, pod: PodRecord) -> None:
        """The gap that replies ask for is binding. A pod that reports sooner is told to come again
        later, and so is a pod whose namespace has used up its budget. Raises Refused."""
        self._require_budget(pod.namespace)
        gap_s = self._registry.least_gap_of(pod.uid)
        if not self._pace.take(pod.uid, at=self._clock(), each_s=gap_s * _EARLY):
            message = f"pod {pod.name} reports more often than each {gap_s:.0f} s"
            raise Refused(429, "too-often", message)

    def _require_budget(self, namespace: str) -> None:
        if self._budget.left(namespace, at=self._clock()) <= 0.0:
            message = f"the reports of namespace {namespace} cost too much; come again later"
            raise Refused(429, "budget", message)

    async def _look_up(self, identity: Identity) -> PodRecord:
        """Look up a pod that the watch has not shown yet, since a sidecar may be faster than the
        watch. Raises Refused."""
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
        self._shown(pod.uid)
        return pod

    @web.middleware
    async def _ends(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Close the connection with each answer. An open one takes some 80 KiB, 800 MiB for 10,000
        sidecars, while a handshake costs a millisecond."""
        response = await self._answer(request, handler)
        response.force_close()
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
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
            event = "report put off" if refused.status == 429 else "report refused"
            warn(event, source=source, code=refused.code, reason=str(refused))
        return _json(Problem(code=refused.code, message=str(refused)), status=refused.status)


@contextmanager
def _known(pod: PodRecord) -> Iterator[None]:
    """Raises Refused if the pod was deleted while its report was processed."""
    try:
        yield
    except KeyError:
        raise Refused(404, "unknown-pod", f"pod {pod.name} is gone") from None


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _body(request: web.Request) -> bytes:
    """The body of a request. Raises Refused if it does not arrive within `_READ_S`."""
    try:
        async with asyncio.timeout(_READ_S):
            return await body_of(request, most_bytes=LARGEST_REPORT_BYTES)
    except TimeoutError:
        raise Refused(408, "too-slow", f"no whole request within {_READ_S:.0f} s") from None


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")
