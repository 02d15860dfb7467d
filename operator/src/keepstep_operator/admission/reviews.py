"""AdmissionReview v1: what the API server asks and hears, and the decision between. Pure."""

from __future__ import annotations

import base64
import enum
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from jsonpatch import make_patch

from keepstep.errors import UsageError
from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.pod import Pod, PodError, injected_of, parse_pod
from keepstep_operator.api.policy import Policy
from keepstep_operator.bodies import Body
from keepstep_operator.injection import Defaults, Near, inject, refuse

_API_VERSION: Final = "admission.k8s.io/v1"
_LONGEST_WARNING: Final = 256
"""The API server cuts what is longer."""


class ReviewError(UsageError):
    """A request that is no AdmissionReview v1 of a pod."""


class Result(str, enum.Enum):
    """For the counter: the sidecar is in, was not wanted or not possible, or we failed."""

    INJECTED = "injected"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Review:
    """A pod that is about to be created: what we look at, and `body`, as it came."""

    uid: str
    operation: str
    pod: Pod
    body: Body

    @property
    def about(self) -> dict[str, object]:
        """For log lines."""
        pod = self.pod
        name = pod.name or (self.body.get("metadata") or {}).get("generateName", "")
        owner = f"{pod.owner.kind}/{pod.owner.name}" if pod.owner else ""
        return {"namespace": pod.namespace, "pod": name, "owner": owner, "policy": pod.policy}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of the pod. `reason` is one word, `message` for people, '' when all is well."""

    result: Result
    reason: str
    patch: tuple[Body, ...] = ()
    message: str = ""
    warnings: tuple[str, ...] = field(default=())


def parse_review(raw: bytes) -> Review:
    """Raises ReviewError."""
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


def admit(
    review: Review, policy: Policy, defaults: Defaults, *, near: tuple[Near, ...] = ()
) -> Verdict:
    """Inject, or say why not. `near`: nodes that hold shards for the pod."""
    try:
        pod = inject(review.body, policy, defaults, near=near)
    except (PodError, PolicyError) as error:
        return decline(review, reason=error.reason, message=str(error))
    said = injected_of(parse_pod(pod))
    return Verdict(
        result=Result.INJECTED,
        reason="Injected",
        patch=tuple(make_patch(review.body, pod)),
        warnings=said.warnings if said else (),
    )


def decline(
    review: Review, *, reason: str, message: str, result: Result = Result.SKIPPED
) -> Verdict:
    """The pod passes without a sidecar, and carries the reason."""
    pod = refuse(review.body, reason=reason, message=message)
    return Verdict(
        result=result,
        reason=reason,
        patch=tuple(make_patch(review.body, pod)),
        message=message,
        warnings=(f"not injected ({reason}): {message}",),
    )


def passed(reason: str) -> Verdict:
    """There is nothing to do."""
    return Verdict(result=Result.SKIPPED, reason=reason)


def answer(uid: str, verdict: Verdict) -> bytes:
    """The AdmissionReview to send back."""
    response: Body = {"uid": uid, "allowed": True}
    if verdict.warnings:
        response["warnings"] = [_warning(one) for one in verdict.warnings]
    if verdict.patch:
        patch = base64.b64encode(msgspec.json.encode(verdict.patch)).decode()
        response.update(patchType="JSONPatch", patch=patch)
    review = {"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": response}
    return msgspec.json.encode(review)


def _warning(text: str) -> str:
    """A single line of what an HTTP header may carry."""
    plain = " ".join(f"keepstep: {text}".split()).encode("ascii", "replace").decode()
    return plain if len(plain) <= _LONGEST_WARNING else plain[: _LONGEST_WARNING - 3] + "..."
