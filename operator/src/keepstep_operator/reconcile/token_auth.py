"""Who sent a request. The API server says which pod a token belongs to; the answer is cached.

A token is bound to its pod and made for our audience only. Nothing that the sender says about
itself is believed. Tokens are cached by their hash, and never logged.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any, Final

from cachetools import TTLCache

from keepstep.errors import KeepstepError
from keepstep.wire.member_reports import AUDIENCE
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import KubeError
from keepstep_operator.kube.resources import TOKEN_REVIEWS
from keepstep_operator.object_body import Body

KNOWN_S: Final = 300.0
"""How long an answer is valid. A deleted pod loses its token; we notice that after at most this
time."""
_WRONG_S: Final = 10.0
"""The API server is not asked about the same wrong token again within this time."""
_REMEMBERED: Final = 20_000
_LONGEST_TOKEN: Final = 16_384
_AT_ONCE: Final = 8
"""TokenReviews at a time."""
_USER: Final = "system:serviceaccount:"
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"
_POD_UID: Final = "authentication.kubernetes.io/pod-uid"


class RequestRefused(KeepstepError):
    """A refused request. `status`: the HTTP status. `code` is stable; the message says why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class TokenPod:
    """The pod that a token is bound to."""

    namespace: str
    pod_name: str
    pod_uid: str


class TokenAuth:
    """The tokens that the API server was asked about. Refused and accepted ones are cached apart,
    so that a flood of wrong tokens does not push out the good ones."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._known: TTLCache[bytes, TokenPod] = TTLCache(_REMEMBERED, KNOWN_S)
        self._refused: TTLCache[bytes, RequestRefused] = TTLCache(_REMEMBERED, _WRONG_S)
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def identify_pod(self, token: str) -> TokenPod:
        """The pod behind the token. Raises RequestRefused."""
        if not token or len(token) > _LONGEST_TOKEN:
            raise RequestRefused(401, "no-token", "a service account token is needed as bearer")
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        if (identity := self._remembered(digest)) is not None:
            return identity
        async with self._turns:
            # a request with the same token may have asked meanwhile
            return self._remembered(digest) or await self._ask(digest, token)

    def _remembered(self, digest: bytes) -> TokenPod | None:
        """The identity from the cache; None: ask. Raises RequestRefused if the token was refused a
        moment ago."""
        if (wrong := self._refused.get(digest)) is not None:
            raise RequestRefused(wrong.status, wrong.code, str(wrong))
        return self._known.get(digest)

    async def _ask(self, digest: bytes, token: str) -> TokenPod:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            answer = await self._client.create(TOKEN_REVIEWS, review)
        except KubeError as error:
            message = f"the API server could not be asked about the token: {error}"
            raise RequestRefused(503, "unavailable", message) from error
        try:
            identity = _identity(answer.get("status") or {})
        except RequestRefused as refused:
            self._refused[digest] = refused
            raise
        self._known[digest] = identity
        return identity


def _identity(status: Body) -> TokenPod:
    """The identity in TokenReview.status. Raises RequestRefused."""
    if not status.get("authenticated"):
        raise RequestRefused(401, "bad-token", "the API server does not accept this token")
    if AUDIENCE not in (status.get("audiences") or []):
        raise RequestRefused(401, "bad-audience", f"the token was not made for {AUDIENCE}")
    user = status.get("user") or {}
    namespace, _, account = str(user.get("username", "")).removeprefix(_USER).partition(":")
    extra = user.get("extra") or {}
    name, uid = _only(extra.get(_POD_NAME)), _only(extra.get(_POD_UID))
    if not (str(user.get("username", "")).startswith(_USER) and account and name and uid):
        raise RequestRefused(403, "no-pod", "the token is not bound to a pod")
    return TokenPod(namespace, name, uid)


def _only(values: Any) -> str:
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""
