"""Which replica reconciles: the one that holds a Lease and has the label by which reports find it.

The leader goes on while the API server is away, because commits need no API server: only another
holder of the Lease ends its role. Its writes to the API end sooner: once the Lease was not renewed
for `WRITES_S`, another replica may soon take it. The other replicas watch nothing and write nothing
until they lead.

`kubernetes.aio.leaderelection` does not serve here: it ends the role when it cannot renew, and
stores local time as UTC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

from keepstep_operator.bodies import Body
from keepstep_operator.journal import say, warn
from keepstep_operator.kube import (
    LEASES,
    PODS,
    TOKEN_REVIEWS,
    Access,
    Client,
    Conflict,
    KubeError,
    NotFound,
)
from keepstep_operator.names import LEADER_LABEL

LEASE_S: Final = 15.0
RENEW_S: Final = 5.0
RETRY_S: Final = 2.0
MARK_S: Final = 60.0
"""How often the label is checked, since it may have been removed."""
WRITES_S: Final = 10.0
"""How long after the last renewal this replica may write. Shorter than `LEASE_S`, after which
another replica may take the Lease."""


class Leadership:
    """The leadership of one replica: `acquire` the role, `hold` it, and `release` it at the end.
    `identity`: the pod's name."""

    def __init__(
        self,
        client: Client,
        *,
        name: str,
        namespace: str,
        identity: str,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._lease_s = lease_s
        self._scale = lease_s / LEASE_S
        self._clock = clock
        self._lease: Body = {}
        self._renewed_at: float | None = None
        self._marked_at: float | None = None
        self._unmarked_because = ""
        self._away = False

    @property
    def leads(self) -> bool:
        """Whether this replica has the role."""
        return bool(self._lease)

    def may_write(self) -> bool:
        """Whether no other replica can have the role yet."""
        at = self._renewed_at
        return at is not None and self._clock() - at < WRITES_S * self._scale

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        seen, since = "", self._clock()
        while True:
            try:
                lease = await self._get()
            except KubeError as error:
                # the Lease may be renewed while it cannot be read
                self._miss(error)
                seen = ""
                await self._pause(RETRY_S)
                continue
            self._away = False
            spec = lease.get("spec") or {}
            holder, now = spec.get("holderIdentity") or "", self._clock()
            said = f"{holder} {spec.get('renewTime')}"
            if said != seen:
                seen, since = said, now
            left_s = since + self._lease_s - now
            is_free = holder in ("", self._identity) or left_s <= 0
            if is_free and await self._take(lease):
                say("leading", lease=self._name, before=holder)
                return
            await self._pause(min(RETRY_S, left_s / self._scale) if left_s > 0 else RETRY_S)

    async def hold(self) -> None:
        """Renew the Lease until another replica leads."""
        while True:
            await self._mark()
            await self._pause(RETRY_S if self._away or self._marked_at is None else RENEW_S)
            try:
                await self._put(self._lease)
                self._away = False
            except (Conflict, NotFound):
                if not await self._take_again():
                    return
            except KubeError as error:
                self._miss(error)

    async def release(self) -> None:
        """Give the Lease up, so that another replica can lead at once."""
        spec = {**(self._lease.get("spec") or {}), "holderIdentity": ""}
        try:
            await self._client.replace(
                LEASES, {**self._lease, "spec": spec}, namespace=self._namespace
            )
        except KubeError as error:
            warn("lease not released", reason=str(error))
        self._lease, self._renewed_at = {}, None

    async def _take_again(self) -> bool:
        """The Lease was written or deleted by another client. Returns whether this replica still
        leads."""
        try:
            found = await self._get()
        except KubeError as error:
            self._miss(error)
            return True
        holder = (found.get("spec") or {}).get("holderIdentity") or ""
        if holder not in ("", self._identity):
            warn("another replica leads", lease=self._name, holder=holder)
            self._lease, self._renewed_at = {}, None
            return False
        await self._take(found)
        return True

    async def _take(self, lease: Body) -> bool:
        try:
            await self._put(lease)
        except (Conflict, NotFound):
            return False
        except KubeError as error:
            self._miss(error)
            return False
        return True

    async def _get(self) -> Body:
        """Read the Lease; empty if there is none. Raises KubeError."""
        try:
            async with _soon():
                return await self._client.get(LEASES, self._name, namespace=self._namespace)
        except NotFound:
            return {}

    async def _put(self, lease: Body) -> None:
        """Write the Lease as ours. The write names the version that was read, so that of two
        replicas one is refused."""
        before: dict[str, Any] = lease.get("spec") or {}
        asked_at, now = self._clock(), _micro_time()
        own = before.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._lease_s)),
            "acquireTime": before.get("acquireTime", now) if own else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (not own),
        }
        metadata = lease.get("metadata") or {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        write = self._client.replace if lease else self._client.create
        async with _soon():
            self._lease = await write(LEASES, body, namespace=self._namespace)
        self._renewed_at = asked_at

    async def _mark(self) -> None:
        """Make this replica the only pod with the label, by which the Service of the reports
        selects."""
        if self._marked_at is not None and self._clock() - self._marked_at < MARK_S * self._scale:
            return
        try:
            async with _soon():
                listed = self._client.list(PODS, namespace=self._namespace, labels=LEADER_LABEL)
                found = {str(one["metadata"]["name"]): one["metadata"] async for one in listed}
                own = found.pop(self._identity, {}).get("labels") or {}
                for name in sorted(found):
                    await self._label(name, None)
                if own.get(LEADER_LABEL) != "true":
                    await self._label(self._identity, "true")
        except KubeError as error:
            if self._marked_at is None and self._unmarked_because != str(error):
                warn("reports do not find this replica: label not set", reason=str(error))
            self._unmarked_because = str(error)
        else:
            self._marked_at = self._clock()

    async def _label(self, name: str, value: str | None) -> None:
        """Set or remove the label, through `pods/status`: the right to patch `pods` would allow
        changing the image of the pod with the keys."""
        patch = {"metadata": {"labels": {LEADER_LABEL: value}}}
        try:
            await self._client.patch(
                PODS, name, patch, namespace=self._namespace, subresource="status"
            )
        except NotFound:
            if name == self._identity:
                raise

    def _miss(self, error: KubeError) -> None:
        if not self._away:
            warn("lease not reached", lease=self._name, reason=str(error), leads=self.leads)
        self._away = True

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._scale)


class FencedClient(Client):
    """A client that writes only while `may_write`. TokenReviews are not writes: it always sends
    them."""

    def __init__(self, access: Access, *, may_write: Callable[[], bool]) -> None:
        super().__init__(access)
        self._may_write = may_write

    async def _call(self, method: str, path: str, **options: Any) -> Body:
        writes = method != "GET" and path != TOKEN_REVIEWS.path()
        if writes and not self._may_write():
            raise KubeError("not written: another replica may lead by now")
        return await super()._call(method, path, **options)


@asynccontextmanager
async def _soon() -> AsyncIterator[None]:
    """Raises KubeError if the answer takes longer than `RENEW_S`."""
    try:
        async with asyncio.timeout(RENEW_S):
            yield
    except TimeoutError as error:
        raise KubeError(f"the API server did not answer within {RENEW_S:.0f} s") from error


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
