"""Who sent a report. The API server says which pod a token belongs to; the answer is cached.

A token is bound to its pod and made for our audience only. Nothing that the sender says about
itself is believed. Tokens are cached by their hash, and never logged.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from keepstep.errors import KeepstepError
from keepstep.wire.reports import AUDIENCE
from keepstep_operator.bodies import Body
from keepstep_operator.kube import TOKEN_REVIEWS, Client, KubeError
from keepstep_operator.reconcile.ratelimit import Buckets

KNOWN_S: Final = 300.0
"""How long an answer is valid. A deleted pod loses its token; we notice that after at most this
time."""
AGAIN_S: Final = 30.0
"""How often it is asked again about each token while the API server does not answer."""
REFUSED_S: Final = 10.0
"""The API server is not asked about the same wrong token again within this time."""
_REMEMBERED: Final = 20_000
_LONGEST_TOKEN: Final = 16_384
_AT_ONCE: Final = 16
_WRONG_AT_ONCE: Final = 30
_WRONG_REFILL_S: Final = 2.0
"""Limits the TokenReviews for wrong tokens of one source: `_WRONG_AT_ONCE` at once, then one every
`_WRONG_REFILL_S`."""
_USER: Final = "system:serviceaccount:"
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"
_POD_UID: Final = "authentication.kubernetes.io/pod-uid"


Cached = TypeVar("Cached")


class Refused(KeepstepError):
    """A refused request. `status`: the HTTP status. `code` is stable; the message says why."""

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
    """A known token. `until`: when the API server is asked again. `ends`: when the token ends."""

    identity: Identity
    until: float
    ends: float


class TokenAuth:
    """The tokens that the API server was asked about. `clock`: unix seconds.

    Refused and accepted tokens are cached separately, so that a flood of wrong tokens does not push
    out the good ones. For each source, the API server is asked about a limited number of wrong
    tokens.
    """

    def __init__(self, client: Client, *, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._refused: dict[bytes, tuple[Refused, float]] = {}
        self._wrong = Buckets[str](burst=_WRONG_AT_ONCE, refill_s=_WRONG_REFILL_S)
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def identify(self, token: str, *, source: str = "") -> Identity:
        """The pod behind the token. Raises Refused."""
        if not token or len(token) > _LONGEST_TOKEN:
            raise Refused(401, "no-token", "a service account token is needed as bearer")
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        if (identity := self._remembered(digest)) is not None:
            return identity
        self._require_plausible(token)
        async with self._turns:
            # a request with the same token may have asked meanwhile
            return self._remembered(digest) or await self._ask(digest, token, source)

    def _remembered(self, digest: bytes) -> Identity | None:
        """The identity from the cache; None: ask. Raises Refused if the token was refused a moment
        ago."""
        now = self._clock()
        if (wrong := self._refused.get(digest)) is not None and wrong[1] > now:
            raise Refused(wrong[0].status, wrong[0].code, str(wrong[0]))
        known = self._known.get(digest)
        if known is None or known.until <= now:
            return None
        self._known[digest] = self._known.pop(digest)  # to the end
        return known.identity

    def _require_plausible(self, token: str) -> None:
        """Refuse a token that itself says that it is not for us: the API server need not be asked.
        Otherwise a token's own claims prove nothing; whether it has expired, the API server knows
        by its own clock. Raises Refused."""
        audience = _claims(token).get("aud", AUDIENCE)
        if AUDIENCE not in (audience if isinstance(audience, list) else [audience]):
            raise Refused(401, "bad-audience", f"the token was not made for {AUDIENCE}")

    async def _ask(self, digest: bytes, token: str, source: str) -> Identity:
        now = self._clock()
        if not self._wrong.take(source, at=now):
            message = "too many wrong tokens came from here; try again in a minute"
            raise Refused(429, "too-many-tokens", message)
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            answer = await self._client.create(TOKEN_REVIEWS, review)
        except KubeError as error:
            self._wrong.give_back(source)
            return self._as_before(digest, error)
        try:
            identity = _identity(answer.get("status") or {})
        except Refused as refused:
            self._known.pop(digest, None)
            _remember(self._refused, digest, (refused, now + REFUSED_S))
            raise
        self._wrong.give_back(source)
        ends = _expiry(_claims(token)) or now + KNOWN_S
        known = _Known(identity, min(now + KNOWN_S, ends), ends)
        _remember(self._known, digest, known)
        return identity

    def _as_before(self, digest: bytes, error: KubeError) -> Identity:
        """The API server does not answer: a token that was known stays so until it ends. Raises
        Refused."""
        known, now = self._known.get(digest), self._clock()
        if known is None or known.ends <= now:
            message = f"the API server could not be asked about the token: {error}"
            raise Refused(503, "unavailable", message) from error
        self._known[digest] = _Known(known.identity, min(now + AGAIN_S, known.ends), known.ends)
        return known.identity


def _remember(cache: dict[bytes, Cached], digest: bytes, value: Cached) -> None:
    cache.pop(digest, None)
    cache[digest] = value
    while len(cache) > _REMEMBERED:
        del cache[next(iter(cache))]


def _identity(status: Body) -> Identity:
    """The identity in TokenReview.status. Raises Refused."""
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


def _claims(token: str) -> Body:
    """The claims of a JWT, unverified; empty if it is not one."""
    try:
        part = token.split(".")[1]
        found = msgspec.json.decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return found if isinstance(found, dict) else {}
    except (IndexError, ValueError, binascii.Error, msgspec.DecodeError, RecursionError):
        return {}


def _expiry(claims: Body) -> float | None:
    """The claim `exp` of a JWT, in unix seconds; None if it has none."""
    expiry = claims.get("exp")
    return float(expiry) if isinstance(expiry, int | float) else None
