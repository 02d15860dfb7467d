"""AdmissionReview v1: the request of the API server, the decision, and the answer. Pure."""

from __future__ import annotations

import base64
import enum
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from jsonpatch import make_patch

from keepstep.errors import UsageError
from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.pod import Pod, PodRefusedError, injected_of, parse_pod
from keepstep_operator.api.policy import Policy
from keepstep_operator.api.run_status import cut_text
from keepstep_operator.injection import (
    InjectionDefaults,
    NamespaceLimits,
    NearNode,
    annotate_skip,
    inject,
)
from keepstep_operator.object_body import Body

_API_VERSION: Final = "admission.k8s.io/v1"
_LONGEST_NAME: Final = 256
_LONGEST_WARNING: Final = 256
"""The API server cuts longer warnings."""


class ReviewError(UsageError):
    """The request is not an AdmissionReview v1 of a pod."""


class InjectionResult(str, enum.Enum):
    """The result, for the counter: the sidecar was injected, was not wanted or not possible, or we
    failed."""

    INJECTED = "injected"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Review:
    """A pod that is about to be created: `pod`, what we use of it, and `body`, the whole pod."""

    uid: str
    operation: str
    pod: Pod
    body: Body

    @property
    def log_fields(self) -> dict[str, object]:
        """The fields for log lines, bounded: the pod is not checked yet."""
        pod = self.pod
        name = pod.name or (self.body.get("metadata") or {}).get("generateName", "")
        owner = f"{pod.owner.kind}/{pod.owner.name}" if pod.owner else ""
        about = {"namespace": pod.namespace, "pod": name, "owner": owner, "policy": pod.policy}
        return {
            key: cut_text(str(text or ""), longest=_LONGEST_NAME) for key, text in about.items()
        }


@dataclass(frozen=True, kw_only=True)
class ReviewDecision:
    """The decision about a pod. `reason` is one word. `message` is for people; '' if all is
    well."""

    result: InjectionResult
    reason: str
    patch: tuple[Body, ...] = ()
    message: str = ""
    warnings: tuple[str, ...] = field(default=())


def parse_review(raw: bytes) -> Review:
    """Parse a request. Raises ReviewError."""
    try:
        request: dict[str, Any] = msgspec.json.decode(raw)["request"]
        body = request["object"]
        if request["kind"]["kind"] != "Pod":
            raise ReviewError(f"an AdmissionReview of a Pod is expected, not of {request['kind']}")
        return Review(
            uid=str(request["uid"]),
            operation=str(request.get("operation") or "CREATE"),
            pod=parse_pod(body, namespace=str(request.get("namespace") or "")),
            body=body,
        )
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ReviewError(f"not an AdmissionReview: {type(error).__name__}: {error}") from error


def decide_review(
    review: Review,
    policy: Policy,
    defaults: InjectionDefaults,
    *,
    near: tuple[NearNode, ...],
    room: NamespaceLimits,
) -> ReviewDecision:
    """Inject the sidecar, or decline with the reason. `near`: nodes that hold shards for the pod.
    `room`: what the rules of its namespace leave."""
    try:
        pod = inject(review.body, policy, defaults, near=near, room=room)
    except (PodRefusedError, PolicyError) as error:
        return skip_injection(review, reason=error.reason, message=str(error))
    injected = injected_of(parse_pod(pod))
    return ReviewDecision(
        result=InjectionResult.INJECTED,
        reason="Injected",
        patch=tuple(make_patch(review.body, pod)),
        warnings=injected.warnings if injected else (),
    )


def skip_injection(
    review: Review, *, reason: str, message: str, result: InjectionResult = InjectionResult.SKIPPED
) -> ReviewDecision:
    """Let the pod pass without a sidecar; it carries the reason."""
    pod = annotate_skip(review.body, reason=reason, message=message)
    return ReviewDecision(
        result=result,
        reason=reason,
        patch=tuple(make_patch(review.body, pod)),
        message=message,
        warnings=(f"not injected ({reason}): {message}",),
    )


def pass_pod(reason: str) -> ReviewDecision:
    """Let the pod pass unchanged."""
    return ReviewDecision(result=InjectionResult.SKIPPED, reason=reason)


def review_answer(uid: str, verdict: ReviewDecision) -> bytes:
    """The AdmissionReview to send back."""
    response: Body = {"uid": uid, "allowed": True}
    if verdict.warnings:
        response["warnings"] = [_warning(warning) for warning in verdict.warnings]
    if verdict.patch:
        patch = base64.b64encode(msgspec.json.encode(verdict.patch)).decode()
        response.update(patchType="JSONPatch", patch=patch)
    review = {"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": response}
    return msgspec.json.encode(review)


def _warning(text: str) -> str:
    """The warning as one line that an HTTP header may carry."""
    plain = " ".join(f"keepstep: {text}".split()).encode("ascii", "replace").decode()
    return plain if len(plain) <= _LONGEST_WARNING else plain[: _LONGEST_WARNING - 3] + "..."
