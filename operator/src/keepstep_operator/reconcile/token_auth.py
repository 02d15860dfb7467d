"""Who sent this report? The API server says which pod a token belongs to; we remember it a while.

A token is bound to its pod, and made for our audience only. Nothing that the sender says about
itself is believed. Tokens are remembered by their hash, never logged.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from keepstep.errors import KeepstepError
from keepstep.wire.reports import AUDIENCE
from keepstep_operator.bodies import Body
from keepstep_operator.kube import TOKEN_REVIEWS, Client, KubeError

KNOWN_S: Final = 300.0
"""A pod that is deleted loses its token; we notice after so long at the latest."""
REFUSED_S: Final = 10.0
"""The same wrong token is not asked about again before that."""
_REMEMBERED: Final = 20_000
_LONGEST_TOKEN: Final = 16_384
_AT_ONCE: Final = 16
_USER: Final = "system:serviceaccount:"
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"
_POD_UID: Final = "authentication.kubernetes.io/pod-uid"


class Refused(KeepstepError):
    """A request that gets no answer. `status`: HTTP's; `code` is stable, the message says why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Identity:
    """The pod that a token is bound to."""

    namespace: str
    pod_name: str
    pod_uid: str


@dataclass(frozen=True, slots=True)
class _Known:
    answer: Identity | Refused
    until: float


class TokenAuth:
    """Tokens that the API server was asked about. `clock`: unix seconds."""

    def __init__(self, client: Client, *, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def identify(self, token: str) -> Identity:
        """The pod behind the token. Raises Refused."""
        if not token or len(token) > _LONGEST_TOKEN:
            raise Refused(401, "no-token", "a service account token is needed as bearer")
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        known = self._remembered(digest)
        if known is None:
            async with self._turns:
                # somebody with the same token may have asked while this one waited
                known = self._remembered(digest) or await self._ask(digest, token)
        if isinstance(known.answer, Refused):
            raise Refused(known.answer.status, known.answer.code, str(known.answer))
        return known.answer

    def _remembered(self, digest: bytes) -> _Known | None:
        known = self._known.get(digest)
        return known if known is not None and known.until > self._clock() else None

    async def _ask(self, digest: bytes, token: str) -> _Known:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            answer = await self._client.create(TOKEN_REVIEWS, review)
        except KubeError as error:
            message = f"the API server could not be asked about the token: {error}"
            raise Refused(503, "unavailable", message) from error
        known = self._judge(answer.get("status") or {}, token)
        self._known.pop(digest, None)
        self._known[digest] = known
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return known

    def _judge(self, status: Body, token: str) -> _Known:
        now = self._clock()
        try:
            identity = _identity(status)
        except Refused as refused:
            return _Known(refused, now + REFUSED_S)
        return _Known(identity, min(now + KNOWN_S, _expiry(token) or now + KNOWN_S))


def _identity(status: Body) -> Identity:
    """From TokenReview.status. Raises Refused."""
    if not status.get("authenticated"):
        raise Refused(401, "bad-token", "the API server does not accept this token")
    if AUDIENCE not in (status.get("audiences") or []):
        raise Refused(401, "bad-audience", f"the token was not made for {AUDIENCE}")
    user = status.get("user") or {}
    namespace, _, account = str(user.get("username", "")).removeprefix(_USER).partition(":")
    extra = user.get("extra") or {}
    name, uid = _only(extra.get(_POD_NAME)), _only(extra.get(_POD_UID))
    if not (str(user.get("username", "")).startswith(_USER) and account and name and uid):
        raise Refused(403, "no-pod", "the token is not bound to a pod")
    return Identity(namespace, name, uid)


def _only(values: Any) -> str:
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""


def _expiry(token: str) -> float | None:
    """`exp` of a JWT whose signature the API server has checked."""
    try:
        part = token.split(".")[1]
        claims = msgspec.json.decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error, msgspec.DecodeError):
        return None
