"""One round for the certificates of one server: read, decide, write, publish, sign.

The order matters. A CA is written to its Secret before it is published, so that a process that dies
in between finds it again. It is published before a leaf is signed with it. All writes carry the
resource version that was read. If another client wrote in between, the round starts again on the
new state.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from keepstep_operator.bodies import Body
from keepstep_operator.certificates.pki import (
    Facts,
    facts,
    is_signed_by,
    make_authority,
    sign_leaf,
    split,
)
from keepstep_operator.certificates.rotation import Lifetimes, Move, due, leaf_due
from keepstep_operator.certificates.secrets import (
    StoredAuthority,
    StoredLeaf,
    read_authority,
    read_leaf,
    write_authority,
    write_leaf,
)
from keepstep_operator.journal import say, warn
from keepstep_operator.kube import (
    CONFIG_MAPS,
    SECRETS,
    WEBHOOKS,
    Client,
    Conflict,
    NotFound,
    PatchType,
    Rejected,
    Resource,
)

_ATTEMPTS = 4
_BUNDLE = "ca.crt"
_PATH = "/inject-"
_PATH_BYTES = 16

Clock = Callable[[], datetime]
"""Returns the present time in UTC."""

Publish = Callable[[bytes, str], Awaitable[str]]
"""Makes a bundle of CAs known to the clients, and to the API server the path of the webhook: the
given one, or with '' the one that it knows, or a new one. Returns the path; '' for a server that
has none. Raises KubeError if that is uncertain."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Service that serves with a leaf. Its Secrets are `<service>-ca` and `<service>-tls`."""

    service: str
    publish: Publish
    lifetimes: Lifetimes

    @property
    def authority_secret(self) -> str:
        return f"{self.service}-ca"

    @property
    def leaf_secret(self) -> str:
        return f"{self.service}-tls"


class Keeper:
    """Keeps the certificates of one server."""

    def __init__(self, client: Client, server: Server, *, namespace: str, clock: Clock) -> None:
        self._client = client
        self._server = server
        self._namespace = namespace
        self._clock = clock
        self._names = (
            f"{server.service}.{namespace}.svc",
            f"{server.service}.{namespace}.svc.cluster.local",
        )

    async def round(self) -> Facts:
        """Do all that is due. Returns the facts of the leaf. Raises KubeError."""
        for _ in range(_ATTEMPTS - 1):
            if leaf := await self._attempt():
                return leaf
        return await self._round()

    async def _attempt(self) -> Facts | None:
        """A round; None if another client wrote meanwhile."""
        try:
            return await self._round()
        except Conflict as error:
            say("written by somebody else", service=self._server.service, reason=str(error))
            return None

    async def _round(self) -> Facts:
        secret, authority = await self._authority()
        path = await self._server.publish(authority.bundle, await self._path())
        if authority.next is not None and authority.since is None:
            authority = replace(authority, since=self._clock())
            await self._write(
                secret, write_authority(secret, self._server.authority_secret, authority)
            )
        return await self._leaf(authority, path)

    async def _authority(self) -> tuple[Body | None, StoredAuthority]:
        """Make all moves that are due now. Returns the Secret as it was read last, and its
        content."""
        while True:
            old = await self._read(self._server.authority_secret)
            authority = read_authority(old)
            move = due(authority.summary(), now=self._clock(), lifetimes=self._server.lifetimes)
            if move is Move.NONE:
                return old, authority
            say("authority", service=self._server.service, move=move.value)
            changed = await self._moved(authority, move)
            await self._write(old, write_authority(old, self._server.authority_secret, changed))

    async def _moved(self, authority: StoredAuthority, move: Move) -> StoredAuthority:
        now, lifetimes = self._clock(), self._server.lifetimes
        match move:
            case Move.ADD_NEXT:
                made = make_authority(self._server.service, now=now, life=lifetimes.authority)
                return replace(authority, next=made, since=None, asked=False)
            case Move.PROMOTE:
                signed = authority.signer.certificate if authority.signer else b""
                return StoredAuthority(signer=authority.next, previous=signed, since=now)
            case Move.DROP_PREVIOUS:
                return replace(authority, previous=b"", since=None)
            case Move.BEGIN | Move.NONE:
                made = make_authority(self._server.service, now=now, life=lifetimes.authority)
                return StoredAuthority(signer=made, previous=await self._trusted(), since=now)

    async def _trusted(self) -> bytes:
        """The bundle that clients have trusted so far, since one of its CAs may have signed the
        present leaf."""
        return read_leaf(await self._read(self._server.leaf_secret)).bundle

    async def _path(self) -> str:
        """The webhook's path that the leaf's Secret has; '' for none."""
        return read_leaf(await self._read(self._server.leaf_secret)).path

    async def _leaf(self, authority: StoredAuthority, path: str) -> Facts:
        old = await self._read(self._server.leaf_secret)
        leaf = read_leaf(old)
        reason = self._leaf_due(leaf, authority)
        same = (leaf.bundle, leaf.path) == (authority.bundle, path)
        if not reason and same and leaf.pair:
            return facts(leaf.pair.certificate)
        pair = leaf.pair
        if reason or pair is None:
            assert authority.signer is not None
            life = self._server.lifetimes.leaf
            pair = sign_leaf(authority.signer, names=self._names, now=self._clock(), life=life)
            say("leaf signed", service=self._server.service, reason=reason)
        leaf = StoredLeaf(pair=pair, bundle=authority.bundle, path=path)
        await self._write(old, write_leaf(old, self._server.leaf_secret, leaf))
        return facts(pair.certificate)

    def _leaf_due(self, leaf: StoredLeaf, authority: StoredAuthority) -> str:
        pair, signer, now = leaf.pair, authority.signer, self._clock()
        certificate = pair.certificate if pair else b""
        assert signer is not None
        since, settle = authority.since, self._server.lifetimes.settle
        return leaf_due(
            facts(certificate) if pair else None,
            names=self._names,
            by_signer=is_signed_by(certificate, signer.certificate),
            trusted=any(is_signed_by(certificate, one) for one in split(authority.bundle)),
            settled=since is None or now >= since + settle,
            now=now,
        )

    async def _read(self, name: str) -> Body | None:
        return await _read(self._client, SECRETS, name, namespace=self._namespace)

    async def _write(self, old: Body | None, new: Body) -> None:
        await _create_or_replace(self._client, SECRETS, old, new, namespace=self._namespace)


class Publisher:
    """The counterpart of `Keeper` if cert-manager makes a server's certificates. A round publishes
    the CA from the leaf's Secret, and writes nothing else."""

    def __init__(self, client: Client, server: Server, *, namespace: str) -> None:
        self._client = client
        self._server = server
        self._namespace = namespace

    async def round(self) -> Facts:
        """Publish the CA. Returns the facts of the leaf. Raises KubeError."""
        name = self._server.leaf_secret
        leaf = read_leaf(await self._client.get(SECRETS, name, namespace=self._namespace))
        if leaf.pair is None or not leaf.bundle:
            raise Rejected(
                f"Secret {name} has no usable tls.crt, tls.key and ca.crt: the issuer must be one"
                " that is a CA and says so (kubectl describe certificate)"
            )
        await self._server.publish(leaf.bundle, "")
        return facts(leaf.pair.certificate)


async def publish_in_webhook(client: Client, name: str, bundle: bytes, path: str = "") -> str:
    """Publish the bundle and the path in every webhook of a MutatingWebhookConfiguration.

    The path is a secret between the API server and admission: who may not read this object cannot
    ask admission anything.
    """
    try:
        body = await client.get(WEBHOOKS, name)
    except NotFound:
        warn("no webhook configuration", name=name)
        return path or _new_path()
    path = path or next(_known_paths(body), "") or _new_path()
    patch = _webhook_patch(body, base64.b64encode(bundle).decode(), path)
    if not patch:
        return path
    try:
        await client.patch(WEBHOOKS, name, patch, kind=PatchType.JSON)
    except Rejected as error:  # a `test` failed: the list has changed since it was read
        raise Conflict(str(error), status=error.status) from error
    say("CA published", webhook=name, webhooks=sum(one["op"] == "test" for one in patch))
    return path


async def publish_in_config_map(
    client: Client, namespace: str, name: str, bundle: bytes, path: str = ""
) -> str:
    """Publish the bundle as ca.crt of a ConfigMap. There is no path."""
    old = await _read(client, CONFIG_MAPS, name, namespace=namespace)
    data = {**((old or {}).get("data") or {}), _BUNDLE: bundle.decode()}
    if old is not None and old.get("data") == data:
        return ""
    metadata = old["metadata"] if old else {"name": name}
    new = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    await _create_or_replace(client, CONFIG_MAPS, old, new, namespace=namespace)
    say("CA published", configmap=name, certificates=len(split(bundle)))
    return ""


def _new_path() -> str:
    """The API server takes only parts of DNS names between slashes."""
    return f"{_PATH}{secrets.token_hex(_PATH_BYTES)}"


def _known_paths(body: Body) -> Iterator[str]:
    """Paths that an earlier round wrote, before it could write the Secret."""
    for one in body.get("webhooks") or []:
        path = str((one["clientConfig"].get("service") or {}).get("path") or "")
        if path.startswith(_PATH):
            yield path


def _webhook_patch(body: Body, bundle: str, path: str) -> list[Body]:
    """The patch that sets bundle and path; empty if all webhooks have them. It tests the name at
    each index, so that it changes no other webhook if the list has changed meanwhile."""
    patch: list[Body] = []
    for index, webhook in enumerate(body.get("webhooks") or []):
        at, client = f"/webhooks/{index}", webhook["clientConfig"]
        wanted = {"caBundle": (client.get("caBundle"), bundle)}
        if "service" in client:
            wanted["service/path"] = (client["service"].get("path"), path)
        changed = {name: new for name, (old, new) in wanted.items() if old != new}
        if changed:
            patch.append({"op": "test", "path": f"{at}/name", "value": webhook["name"]})
        for name, new in changed.items():
            patch.append({"op": "add", "path": f"{at}/clientConfig/{name}", "value": new})
    return patch


async def _read(client: Client, resource: Resource, name: str, *, namespace: str) -> Body | None:
    try:
        return await client.get(resource, name, namespace=namespace)
    except NotFound:
        return None


async def _create_or_replace(
    client: Client, resource: Resource, old: Body | None, new: Body, *, namespace: str
) -> None:
    if old is None:
        await client.create(resource, new, namespace=namespace)
    else:
        await client.replace(resource, new, namespace=namespace)
