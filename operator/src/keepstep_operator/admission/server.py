"""One review in, one answer out, always `allowed: true`, always in time; and nothing for strangers.

An answer tells what a policy says, and which nodes hold a run's shards. Whoever reaches the port
could ask for that. So reviews are taken at one path, which only the API server knows besides us:
the certificates component chooses it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from keepstep_operator.admission.checkpoint_run_reader import ExistingRun, ExistingRunReader
from keepstep_operator.admission.metrics import AdmissionMetrics
from keepstep_operator.admission.namespace_limits import NamespaceLimitsReader
from keepstep_operator.admission.policy_lookup import Policies, PolicyAbsent
from keepstep_operator.admission.reviews import (
    InjectionResult,
    Review,
    ReviewDecision,
    ReviewError,
    decide_review,
    parse_review,
    pass_pod,
    review_answer,
    skip_injection,
)
from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.pod import Placement, PodRefusedError, parse_run_and_node_rank
from keepstep_operator.api.run_status import cut_text
from keepstep_operator.injection import InjectionDefaults, is_injected
from keepstep_operator.kube.errors import KubeError, Unavailable
from keepstep_operator.log import crash, info
from keepstep_operator.serving import Ready, health_routes

TIMEOUT_S: Final = 10
"""The timeout of the webhook, the chart's default."""
_LARGEST_REVIEW_BYTES: Final = 4 << 20
"""An API server accepts objects of at most 3 MiB."""
_AGAIN_S: Final = 0.25


def deadline_of(timeout_s: float) -> float:
    """The deadline of a review. It is shorter than the webhook's timeout, which includes the
    transfers."""
    return 0.7 * timeout_s


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Reviews pods. `defaults` is called for each pod; it returns None until the reports CA is
    known. `path`: where reviews are taken; '' for nowhere yet."""

    policies: Policies
    records: ExistingRunReader
    rooms: NamespaceLimitsReader
    defaults: Callable[[], InjectionDefaults | None]
    metrics: AdmissionMetrics
    deadline_s: float
    path: Callable[[], str]

    def application(self, ready: Ready) -> web.Application:
        """The application of the webhook's port."""
        app = web.Application(middlewares=[_ends], client_max_size=_LARGEST_REVIEW_BYTES)
        app.add_routes([*health_routes(ready), web.post("/{path:.*}", self._inject)])
        return app

    async def review_pod(self, review: Review) -> ReviewDecision:
        """Decide about one pod. Never raises, and never takes much longer than the deadline."""
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._decided(review)
        except TimeoutError:
            reason = "Timeout"
            message = f"no policy within {self.deadline_s} s: the API server does not answer"
        except KubeError as error:
            reason, message = "Unavailable", str(error)
        except Exception as error:
            crash("admission.review_crashed", **review.log_fields)
            reason, message = "Internal", f"{type(error).__name__}: {error}"
        return skip_injection(review, reason=reason, message=message, result=InjectionResult.FAILED)

    async def _decided(self, review: Review) -> ReviewDecision:
        """The decision, however often the API server has to be asked."""
        while True:
            try:
                return await self._decide(review)
            except Unavailable:  # noqa: PERF203
                await asyncio.sleep(_AGAIN_S)

    async def _decide(self, review: Review) -> ReviewDecision:
        if (name := review.pod.policy) is None or review.operation != "CREATE":
            return pass_pod("NotAsked")
        if is_injected(review.pod):
            return pass_pod("AlreadyInjected")
        if (defaults := self.defaults()) is None:
            return skip_injection(
                review,
                reason="NotReady",
                message="keepstep's admission does not know the reports CA yet; is"
                " `keepstep-operator certificates` running?",
                result=InjectionResult.FAILED,
            )
        place = _place(review)
        record = await self._recorded(review, place)
        try:
            policy = record.policy
            if policy is None or policy.name != name:
                policy = await self.policies.get(review.pod.namespace, name)
        except PolicyAbsent as error:
            return skip_injection(review, reason="PolicyNotFound", message=str(error))
        except PolicyError as error:
            return skip_injection(review, reason=error.reason, message=f"policy {name}: {error}")
        kept = policy.host_paths or policy.peers is not None
        near = record.list_preferred_nodes(place.node_rank) if place is not None and kept else ()
        defaults = defaults.with_sidecar_image(record.image, record.version)
        room = await self.rooms.of(review.pod.namespace)
        return decide_review(review, policy, defaults, near=near, room=room)

    async def _recorded(self, review: Review, place: Placement | None) -> ExistingRun:
        if place is None:
            return ExistingRun()
        return await self.records.get(review.pod.namespace, place.run_key)

    async def _inject(self, request: web.Request) -> web.Response:
        asked, path = request.path.encode(), self.path().encode()
        if not hmac.compare_digest(asked, path):
            raise web.HTTPNotFound  # before the body is read
        async with asyncio.timeout(self.deadline_s):
            raw = await request.read()
        begun = time.perf_counter()
        try:
            review = parse_review(raw)
        except ReviewError as error:
            info("admission.request_refused", level=logging.WARNING, error=str(error))
            return web.Response(text=f"{error}\n", status=400)
        verdict = await self.review_pod(review)
        response = web.Response(
            body=review_answer(review.uid, verdict), content_type="application/json"
        )
        seconds = time.perf_counter() - begun
        self.metrics.count_review(verdict, seconds=seconds)
        _log_verdict(review, verdict, seconds)
        return response


@web.middleware
async def _ends(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Close the connection with each answer. The API server reuses open connections, also one to a
    replica whose node was lost (kubernetes/kubernetes#127335); each review on that one is a pod
    without a sidecar."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response


def _place(review: Review) -> Placement | None:
    try:
        return parse_run_and_node_rank(review.pod)
    except PodRefusedError:  # `decide_review` reports it
        return None


def _log_verdict(review: Review, verdict: ReviewDecision, seconds: float) -> None:
    if verdict.reason == "NotAsked":
        return
    level = logging.WARNING if verdict.warnings else logging.INFO
    info(
        "admission.pod_reviewed",
        level=level,
        result=verdict.result.value,
        reason=verdict.reason,
        message=cut_text(verdict.message or "; ".join(verdict.warnings)),
        duration_ms=round(seconds * 1000, 1),
        **review.log_fields,
    )
