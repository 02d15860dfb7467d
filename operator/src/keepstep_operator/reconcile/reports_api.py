"""The API for sidecars: `POST /v1/runs` and `/v1/certificates`, over HTTPS.

The order matters. First the token says which pod asks, then our own record says what pod that is,
and only then its body is read. Every refused request is answered with {code, message}, counted, and
logged once per source and reason in a while.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from cachetools import TTLCache

from keepstep.wire import run_reports as wire
from keepstep.wire.member_reports import CERTIFICATES_PATH, CertificateRequest
from keepstep.wire.run_reports import RunReport
from keepstep.wire.trainer import Problem
from keepstep_operator import names
from keepstep_operator.api.cluster_objects import AgentRecord, PodRecord
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import KubeError, NotFound
from keepstep_operator.kube.resources import PODS
from keepstep_operator.log import crash, warn
from keepstep_operator.object_body import Body
from keepstep_operator.reconcile.metrics import ReconcileMetrics
from keepstep_operator.reconcile.parsing import parse_agent_pod, parse_pod_record
from keepstep_operator.reconcile.peer_certificates import (
    PeerCertificates,
    agent_identity,
    pod_identity,
)
from keepstep_operator.reconcile.run_registry import RunRegistry
from keepstep_operator.reconcile.token_auth import RequestRefused, TokenAuth, TokenPod
from keepstep_operator.serving import Ready, health_routes

_LOGGED_EVERY_S: Final = 600.0
_READ_S: Final = 20.0
_SOURCES: Final = 1000
_LEAST_GAP_S: Final = 1.0
"""Between two reports of one pod."""
_PODS: Final = 10_000

_decode_report: Final = msgspec.json.Decoder(RunReport).decode
_decode_request: Final = msgspec.json.Decoder(CertificateRequest).decode
_encode: Final = msgspec.json.Encoder().encode


class ReportsApi:
    """Takes reports of leaders, and signs. `namespace`: of agents."""

    def __init__(
        self,
        registry: RunRegistry,
        client: KubeClient,
        *,
        metrics: ReconcileMetrics,
        ready: Ready,
        signing: PeerCertificates,
        namespace: str,
    ) -> None:
        self._registry = registry
        self._client = client
        self._tokens = TokenAuth(client)
        self._metrics = metrics
        self._ready = ready
        self._signing = signing
        self._namespace = namespace
        self._logged: TTLCache[tuple[str, str], bool] = TTLCache(_SOURCES, _LOGGED_EVERY_S)
        self._lately: TTLCache[str, bool] = TTLCache(_PODS, _LEAST_GAP_S)

    def application(self) -> web.Application:
        """The application. Every error is answered with a `Problem`."""
        app = web.Application(middlewares=[self._answer], client_max_size=wire.LARGEST_BYTES)
        mine = [web.post(wire.PATH, self._take), web.post(CERTIFICATES_PATH, self._sign)]
        app.add_routes([*mine, *health_routes(self._ready)])
        return app

    async def _take(self, request: web.Request) -> web.Response:
        pod = await self._pod(await self._identity(request))
        if pod.uid in self._lately:
            raise RequestRefused(
                429, "too-often", f"pod {pod.name} reported less than a second ago"
            )
        self._lately[pod.uid] = True
        report = check_bounds(_decode_report(await _body(request)))
        answer = self._registry.handle_report(pod, report, authorities=self._signing.authorities)
        if answer is None:
            message = f"pod {pod.name} does not lead its run: node rank 0 does, its oldest pod"
            raise RequestRefused(409, "not-the-leader", message)
        self._metrics.reports.inc()
        return _json(answer)

    async def _sign(self, request: web.Request) -> web.Response:
        """Sign a certificate for a sidecar, or for the agent of a node."""
        identity = await self._identity(request)
        pod = self._registry.find_pod_by_uid(identity.pod_uid)
        if pod is None and identity.namespace == self._namespace:
            uri = agent_identity(await self._agent(identity))
        else:
            uri = pod_identity(await self._pod(identity))
        return _json(self._signing.issue_certificate(uri, _decode_request(await _body(request))))

    # --- who asks ----------------------------------------------------------------------------

    async def _identity(self, request: web.Request) -> TokenPod:
        """Whose token came with the request. Raises RequestRefused."""
        if reason := self._ready():
            raise RequestRefused(503, "starting", reason)
        return await self._tokens.identify_pod(_bearer(request))

    async def _pod(self, identity: TokenPod) -> PodRecord:
        """The pod of this token, by our own record. Raises RequestRefused."""
        pod = self._registry.find_pod_by_uid(identity.pod_uid)
        if pod is None:  # a sidecar may be faster than the watch
            pod = parse_pod_record(await self._resolve(identity))
            if pod is not None:
                self._registry.pod_seen(pod)
        if pod is None or not pod.injected or pod.namespace != identity.namespace:
            message = f"pod {identity.pod_name} was not given this sidecar"
            raise RequestRefused(403, "not-injected", message)
        run = self._registry.runs[pod.run]
        if pod.job in run.rivals:
            message = f"run {pod.run.name} belongs to another job, which pod {pod.name} is not of"
            raise RequestRefused(403, "run-taken", message)
        return pod

    async def _agent(self, identity: TokenPod) -> AgentRecord:
        """The agent of this token. Only the chart makes pods in its namespace. Raises
        RequestRefused."""
        body = await self._resolve(identity)
        if names.AGENT_LABEL not in ((body.get("metadata") or {}).get("labels") or {}):
            raise RequestRefused(
                403, "not-injected", f"pod {identity.pod_name} is no agent of a node"
            )
        return parse_agent_pod(body)

    async def _resolve(self, identity: TokenPod) -> Body:
        try:
            body = await self._client.get(PODS, identity.pod_name, namespace=identity.namespace)
        except NotFound:
            raise RequestRefused(
                404, "unknown-pod", f"there is no pod {identity.pod_name}"
            ) from None
        except KubeError as error:
            raise RequestRefused(503, "unavailable", f"the pod cannot be read: {error}") from error
        if (body.get("metadata") or {}).get("uid") != identity.pod_uid:
            message = f"the token is of an earlier pod {identity.pod_name}"
            raise RequestRefused(403, "other-pod", message)
        return body

    # --- answers -----------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestRefused as refused:
            return self._refuse(request, refused)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            return self._refuse(request, RequestRefused(400, "bad-report", str(error)))
        except web.HTTPException as error:
            return self._refuse(request, RequestRefused(error.status, "bad-request", error.reason))
        except Exception:
            crash("api.request_crashed", source=request.remote)
            message = "the operator failed; its log says why"
            return _json(Problem(code="internal", message=message), status=500)

    def _refuse(self, request: web.Request, refused: RequestRefused) -> web.Response:
        self._metrics.refused.labels(refused.code).inc()
        source = request.remote or "?"
        if (source, refused.code) not in self._logged:
            self._logged[source, refused.code] = True
            warn("api.request_refused", source=source, code=refused.code, error=str(refused))
        return _json(Problem(code=refused.code, message=str(refused)), status=refused.status)


def check_bounds(report: RunReport) -> RunReport:
    """The report, if each list and text of it is within its bound. Raises RequestRefused: a leader
    cuts what it sends, so this one is not ours."""
    record = report.record
    tallies = record.goodput.tallies if record.goodput is not None else ()
    lists = (
        (report.nodes, wire.MOST_NODES),
        (report.recent, wire.MOST_RECENT),
        (report.alarms, wire.MOST_MESSAGES),
        (report.doubts, wire.MOST_MESSAGES),
        (report.epochs, wire.MOST_EPOCHS),
        (report.commits, wire.MOST_COMMITS),
        (report.kept, wire.MOST_KEPT),
        (report.safe.sole, wire.MOST_SOLE),
        (record.holders, wire.MOST_HOLDERS),
        (record.drives, wire.MOST_DRIVES),
        (tallies, wire.MOST_TALLIES),
        *((node.warnings, wire.MOST_NODE_WARNINGS) for node in report.nodes),
    )
    if any(len(listed) > most for listed, most in lists):
        raise RequestRefused(
            400, "bad-report", "a list of the report is longer than keepstep.wire.run_reports says"
        )
    return report


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _body(request: web.Request) -> bytes:
    """The body of a request. Raises RequestRefused if it does not arrive within `_READ_S`."""
    try:
        async with asyncio.timeout(_READ_S):
            return await request.read()
    except TimeoutError:
        raise RequestRefused(408, "too-slow", f"no whole request within {_READ_S:.0f} s") from None


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")
