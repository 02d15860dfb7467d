"""Who a viewer is, and whether they may see a namespace. The API server says both; answers are
cached.

Nothing that viewers say about themselves is believed. Tokens are cached by their hash, and never
logged. Refusals are not cached, so that a newly given right counts at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from cachetools import TTLCache

from keepstep.errors import KeepstepError
from keepstep_operator import names
from keepstep_operator.bodies import Body
from keepstep_operator.kube import (
    ACCESS_REVIEWS,
    CHECKPOINTS,
    RUNS,
    TOKEN_REVIEWS,
    Client,
    Resource,
)

KNOWN_S: Final = 30.0
"""How long an answer is cached. An expired token or a removed right is noticed after at most this
time."""
NEEDED: Final = (RUNS, CHECKPOINTS)
"""The kinds that a viewer must be allowed to list."""
_REMEMBERED: Final = 4096


class UnknownViewer(KeepstepError):
    """The API server does not accept the token."""


@dataclass(frozen=True)
class Viewer:
    """A user as TokenReview describes them."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Body = field(default_factory=dict, hash=False)


class Viewers:
    """The known viewers and their rights. `clock`: seconds that only grow. All methods raise
    KubeError."""

    def __init__(self, client: Client, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._known: TTLCache[bytes, Viewer] = TTLCache(_REMEMBERED, KNOWN_S, timer=clock)
        self._allowed: TTLCache[tuple[Viewer, str], bool] = TTLCache(
            _REMEMBERED, KNOWN_S, timer=clock
        )

    async def who(self, token: str) -> Viewer:
        """The user whose token this is. Raises UnknownViewer."""
        if not token:
            raise UnknownViewer("a token is needed, which `kubectl keepstep ui` brings")
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        if (known := self._known.get(digest)) is not None:
            return known
        # first with the API server's own audience; then with ours, for a token made for the page
        found = await self._review(token) or await self._review(token, names.UI_AUDIENCE)
        if found is None:
            self._known.pop(digest, None)
            raise UnknownViewer("the API server does not accept this token; it may be over")
        self._known[digest] = found
        return found

    async def missing(self, viewer: Viewer, namespace: str) -> tuple[str, ...]:
        """The kinds that `viewer` may not list in `namespace`, by plural; empty if they may
        look."""
        if (viewer, namespace) in self._allowed:
            return ()
        missing = [one.plural for one in NEEDED if not await self._may_list(viewer, one, namespace)]
        if not missing:
            self._allowed[viewer, namespace] = True
        return tuple(missing)

    async def _review(self, token: str, audience: str = "") -> Viewer | None:
        spec: Body = {"token": token, **({"audiences": [audience]} if audience else {})}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        status = (await self._client.create(TOKEN_REVIEWS, body)).get("status") or {}
        if not status.get("authenticated"):
            return None
        if audience and audience not in (status.get("audiences") or ()):
            return None  # the authenticator ignores audiences: the first review decides
        user: dict[str, Any] = status.get("user") or {}
        if not user.get("username"):
            return None
        return Viewer(
            name=str(user["username"]),
            uid=str(user.get("uid") or ""),
            groups=tuple(user.get("groups") or ()),
            extra=user.get("extra") or {},
        )

    async def _may_list(self, viewer: Viewer, resource: Resource, namespace: str) -> bool:
        asked = {
            "namespace": namespace,
            "verb": "list",
            "group": resource.group,
            "version": resource.version,
            "resource": resource.plural,
        }
        spec = {
            "user": viewer.name,
            "uid": viewer.uid,
            "groups": list(viewer.groups),
            "extra": viewer.extra,
            "resourceAttributes": asked,
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": spec,
        }
        status = (await self._client.create(ACCESS_REVIEWS, body)).get("status") or {}
        return bool(status.get("allowed")) and not status.get("denied")
