"""One round for one ring: read, publish, decide, write, publish.

A new pair is published before it is used, and written before it is published, so that a process
that dies in between finds it again. All writes carry the resource version that was read. If another
client wrote in between, the round starts again on the new state.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta

from keepstep_operator.certificates import ring as rings
from keepstep_operator.certificates.pki import (
    KeyPair,
    Validity,
    certificate_validity,
    make_authority,
    make_server,
)
from keepstep_operator.certificates.ring import CertificateRing, RingAction, due_move
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import Conflict, NotFound, Rejected
from keepstep_operator.kube.resources import SECRETS, WEBHOOKS, PatchType
from keepstep_operator.log import info, warn
from keepstep_operator.object_body import Body

_ATTEMPTS = 4
_PATH_BYTES = 16

Clock = Callable[[], datetime]
"""Returns the present time in UTC."""


@dataclass(frozen=True, kw_only=True)
class KeptCertificate:
    """What is kept in the Secret `secret`: a server's certificate with these DNS `names`, which the
    API server calls by the MutatingWebhookConfiguration `webhook`; or without them an authority,
    whose bundle is mounted where it is needed."""

    secret: str
    life: timedelta
    overlap: timedelta
    names: tuple[str, ...] = ()
    webhook: str = ""


@dataclass(frozen=True)
class CertificateKeeper:
    """Keeps one ring."""

    client: KubeClient
    kept: KeptCertificate
    _: KW_ONLY
    namespace: str
    clock: Clock

    async def round(self) -> Validity:
        """Do all that is due. Returns the validity of the certificate in use. Raises KubeError."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._round()
            except Conflict as error:  # noqa: PERF203
                info("certificate.write_conflicted", secret=self.kept.secret, error=str(error))
        return await self._round()

    async def _round(self) -> Validity:
        old = await self._read()
        ring = rings.read_ring(old)
        if self.kept.webhook and not ring.path:
            ring = replace(ring, path=_new_path())
        if ring.used is not None:
            await self._publish(ring)
        move = due_move(ring, now=self.clock(), overlap=self.kept.overlap)
        if move is not RingAction.NONE:
            info("certificate.rotated", secret=self.kept.secret, authority=move.value)
            ring = self._moved(ring, move)
        new = rings.ring_secret(old, self.kept.secret, ring)
        if old is None:
            await self.client.create(SECRETS, new, namespace=self.namespace)
        elif new["data"] != old.get("data"):
            await self.client.replace(SECRETS, new, namespace=self.namespace)
        await self._publish(ring)
        assert ring.used is not None
        return certificate_validity(ring.used.certificate)

    def _moved(self, ring: CertificateRing, move: RingAction) -> CertificateRing:
        match move:
            case RingAction.BEGIN:
                made, now = self._made(), self.clock()
                return CertificateRing(used=made, previous=ring.bundle, since=now, path=ring.path)
            case RingAction.ADD_NEXT:
                return replace(ring, next=self._made(), asked=False)
            case RingAction.PROMOTE:
                used = ring.used.certificate if ring.used else b""
                return CertificateRing(
                    used=ring.next, previous=used, since=self.clock(), path=ring.path
                )
            case _:
                return replace(ring, previous=b"")

    def _made(self) -> KeyPair:
        now, life = self.clock(), self.kept.life
        if self.kept.names:
            return make_server(self.kept.names, now=now, life=life)
        return make_authority(self.kept.secret, now=now, life=life)

    async def _read(self) -> Body | None:
        try:
            return await self.client.get(SECRETS, self.kept.secret, namespace=self.namespace)
        except NotFound:
            return None

    async def _publish(self, ring: CertificateRing) -> None:
        if self.kept.webhook:
            await publish_in_webhook(self.client, self.kept.webhook, ring)


async def publish_in_webhook(client: KubeClient, name: str, ring: CertificateRing) -> None:
    """Publish bundle and path in every webhook of a MutatingWebhookConfiguration.

    The path is a secret between the API server and admission: who may not read this object cannot
    ask admission anything.
    """
    try:
        body = await client.get(WEBHOOKS, name)
    except NotFound:
        warn("certificate.webhook_missing", webhook=name)
        return
    patch = _webhook_patch(body, base64.b64encode(ring.bundle).decode(), ring.path)
    if not patch:
        return
    try:
        await client.patch(WEBHOOKS, name, patch, kind=PatchType.JSON)
    except Rejected as error:  # a `test` failed: the list has changed since it was read
        raise Conflict(str(error), status=error.status) from error
    info("certificate.authority_published", webhook=name)


def _new_path() -> str:
    """The API server takes only parts of DNS names between slashes."""
    return f"/inject-{secrets.token_hex(_PATH_BYTES)}"


def _webhook_patch(body: Body, bundle: str, path: str) -> list[Body]:
    """The patch that sets bundle and path; empty if all webhooks have them. It tests the name at
    each index, so that it changes no other webhook if the list has changed meanwhile."""
    patch: list[Body] = []
    for index, webhook in enumerate(body.get("webhooks") or []):
        at, client = f"/webhooks/{index}", webhook["clientConfig"]
        target = {"caBundle": (client.get("caBundle"), bundle)}
        if "service" in client:
            target["service/path"] = (client["service"].get("path"), path)
        changed = {name: new for name, (old, new) in target.items() if old != new}
        if changed:
            patch.append({"op": "test", "path": f"{at}/name", "value": webhook["name"]})
        for name, new in changed.items():
            patch.append({"op": "add", "path": f"{at}/clientConfig/{name}", "value": new})
    return patch
