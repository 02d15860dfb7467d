"""A small client of the Kubernetes API over aiohttp, for all components.

    KubeError
      NotFound        404
      Conflict        409: somebody wrote meanwhile, or it exists already; read again, decide again
      Denied          401, 403: a role lacks a rule
      Expired         410: a watch or a list is too old; list again
      Rejected        400, 422 and other 4xx: the request is wrong
      Unavailable     429, 5xx, no answer in time, no connection: try again later

It knows no kinds: a `Resource` says where a kind is served, objects are JSON. Inside a cluster it
is the pod's service account (the token is read anew for each request, as the kubelet rotates it);
outside, what KUBECONFIG names (token, client certificate; no exec plugins).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import enum
import os
import random
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import yaml

from keepstep.errors import KeepstepError, UsageError
from keepstep_operator import names
from keepstep_operator.bodies import Body

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_S: Final = 10.0
_WATCH_S: Final = 240
"""The server ends a watch after so long, and we ask for the next one: a connection that died
without a word is noticed."""
_LEAST_WATCH_S: Final = 1.0
_PAGE: Final = 500
_BACKOFF_S: Final = (0.5, 15.0)


Patch = Body | list[Body]
"""A merge patch, or a list of JSON patch operations."""


class KubeError(KeepstepError):
    """The API server said no, or nothing. `status`: HTTP's, 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFound(KubeError):
    """404: the object, or the kind, is not there."""


class Conflict(KubeError):
    """409: somebody wrote meanwhile, or it exists already; read again, decide again."""


class Denied(KubeError):
    """401 or 403: the service account lacks a rule, or the token is not accepted."""


class Expired(KubeError):
    """410: the resource version is too old; list again."""


class Rejected(KubeError):
    """The request is wrong; trying again will not help."""


class Unavailable(KubeError):
    """No answer, or one that says try again later."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """Where a kind is served. `group` is '' for the core API."""

    group: str
    version: str
    plural: str

    def path(self, *parts: str, namespace: str | None = None) -> str:
        """Of the collection, or of the object and subresource that `parts` name."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return "/".join((f"{root}{scope}/{self.plural}", *parts))


POLICIES: Final = Resource(group=names.GROUP, version=names.VERSION, plural="checkpointpolicies")
RUNS: Final = Resource(group=names.GROUP, version=names.VERSION, plural="checkpointruns")
CHECKPOINTS: Final = Resource(group=names.GROUP, version=names.VERSION, plural="checkpoints")
PODS: Final = Resource(group="", version="v1", plural="pods")
NODES: Final = Resource(group="", version="v1", plural="nodes")
SECRETS: Final = Resource(group="", version="v1", plural="secrets")
CONFIG_MAPS: Final = Resource(group="", version="v1", plural="configmaps")
EVENTS: Final = Resource(group="", version="v1", plural="events")
TOKEN_REVIEWS: Final = Resource(group="authentication.k8s.io", version="v1", plural="tokenreviews")
WEBHOOKS: Final = Resource(
    group="admissionregistration.k8s.io", version="v1", plural="mutatingwebhookconfigurations"
)


class PatchType(str, enum.Enum):
    """The media types of PATCH. `MERGE` replaces lists whole."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All objects of a collection at one resource version, from which a watch goes on."""

    items: tuple[Body, ...]
    resource_version: str


class ChangeKind(str, enum.Enum):
    """What a watch says. A bookmark carries a resource version and nothing else."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One event of a watch: the object as it is now, or was last when it is DELETED."""

    kind: ChangeKind
    body: Body

    @property
    def resource_version(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach an API server, and as whom. `namespace`: where we live, or work by default."""

    server: str
    ssl: ssl.SSLContext | None
    token: Callable[[], str | None]
    namespace: str = "default"


def find_access() -> Access:
    """KUBECONFIG when it is set, else the pod's service account. Raises UsageError."""
    if path := os.environ.get("KUBECONFIG"):
        return from_kubeconfig(Path(path))
    return in_cluster()


def in_cluster(directory: Path = SERVICE_ACCOUNT) -> Access:
    """The pod's own service account. Raises UsageError outside a cluster."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = directory / "token"
    if not host or not token.exists():
        raise UsageError(
            "no Kubernetes API here: neither KUBECONFIG is set, nor a service account is mounted"
        )
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ssl=ssl.create_default_context(cafile=str(directory / "ca.crt")),
        token=lambda: token.read_text().strip(),
        namespace=(directory / "namespace").read_text().strip(),
    )


def from_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig: token or client certificate. Raises UsageError."""
    try:
        config = yaml.safe_load(path.read_text())
        context = _named(config, "context", config["current-context"])
        cluster = _named(config, "cluster", context["cluster"])
        user = _named(config, "user", context["user"])
        return Access(
            server=cluster["server"].rstrip("/"),
            ssl=_ssl_of(cluster, user, path.parent),
            token=lambda: _token_of(user, path.parent),
            namespace=context.get("namespace", "default"),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, ssl.SSLError) as error:
        raise UsageError(f"kubeconfig {path}: {type(error).__name__}: {error}") from error


class Client:
    """An asynchronous context that owns the connections. All methods raise KubeError.

    `namespace=None` means a cluster-scoped object, or a collection over all namespaces.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(ssl=self._access.ssl or True, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def namespace(self) -> str:
        """Where this process lives."""
        return self._access.namespace

    async def get(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str | None = None,
        timeout_s: float = _REQUEST_S,
    ) -> Body:
        path = resource.path(name, namespace=namespace)
        return await self._call("GET", path, timeout_s=timeout_s)

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
    ) -> Listing:
        """The whole collection, asked for in pages. `labels`, `fields`: selectors."""
        path = resource.path(namespace=namespace)
        items: list[Body] = []
        query = {"limit": str(_PAGE), **_selectors(labels, fields)}
        while True:
            page = await self._call("GET", path, query=query)
            with _mapped_errors():
                items += page.get("items") or []
                version, token = (
                    page["metadata"]["resourceVersion"],
                    page["metadata"].get("continue"),
                )
            if not token:
                return Listing(items=tuple(items), resource_version=version)
            query["continue"] = token

    async def watch(
        self,
        resource: Resource,
        *,
        resource_version: str,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
    ) -> AsyncIterator[Change]:
        """What changes after `resource_version`, bookmarks included, until the server ends it.

        Raises Expired when the version is too old.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_S),
            **_selectors(labels, fields),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_REQUEST_S, sock_read=_WATCH_S + 30
        )
        with _mapped_errors():
            path = resource.path(namespace=namespace)
            async with self._request("GET", path, query, timeout=timeout) as response:
                await _require_success(response)
                async for line in _lines(response.content):
                    yield _change(msgspec.json.decode(line))

    async def follow(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
    ) -> AsyncIterator[Listing | Change | KubeError]:
        """A collection for ever: a Listing (all there is now), then every Change, and again a
        Listing whenever something may have been missed.

        An error is yielded once it happens, so that it can be shown, then tried again after a pause
        that grows to 15 s.
        """
        where: dict[str, Any] = {"namespace": namespace, "labels": labels, "fields": fields}
        failures = 0
        while True:
            async for event in self._followed(resource, where):
                yield event
                failures = failures + 1 if isinstance(event, KubeError) else 0
            if failures:
                await asyncio.sleep(_pause_s(failures))

    async def _followed(
        self, resource: Resource, where: dict[str, Any]
    ) -> AsyncIterator[Listing | Change | KubeError]:
        """List, then watch, until something may have been missed, or fails."""
        loop = asyncio.get_running_loop()
        try:
            listing = await self.list(resource, **where)
            yield listing
            version = listing.resource_version
            while True:
                begun = loop.time()
                async for change in self.watch(resource, resource_version=version, **where):
                    version = change.resource_version
                    if change.kind is not ChangeKind.BOOKMARK:
                        yield change
                # one that ends at once, again and again, must not become a storm
                await asyncio.sleep(max(0.0, _LEAST_WATCH_S - (loop.time() - begun)))
        except Expired:
            return
        except KubeError as error:
            yield error

    async def create(self, resource: Resource, body: Body, *, namespace: str | None = None) -> Body:
        """Raises Conflict when it exists."""
        return await self._call("POST", resource.path(namespace=namespace), body=body)

    async def replace(
        self,
        resource: Resource,
        body: Body,
        *,
        namespace: str | None = None,
        subresource: str = "",
    ) -> Body:
        """PUT under the body's name. With metadata.resourceVersion in it, raises Conflict when
        somebody wrote meanwhile."""
        parts = (body["metadata"]["name"], *filter(None, [subresource]))
        return await self._call("PUT", resource.path(*parts, namespace=namespace), body=body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: Patch,
        *,
        namespace: str | None = None,
        kind: PatchType = PatchType.MERGE,
        subresource: str = "",
    ) -> Body:
        parts = (name, *filter(None, [subresource]))
        path = resource.path(*parts, namespace=namespace)
        return await self._call("PATCH", path, body=patch, content_type=kind.value)

    async def delete(self, resource: Resource, name: str, *, namespace: str | None = None) -> Body:
        return await self._call("DELETE", resource.path(name, namespace=namespace))

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Patch | None = None,
        content_type: str = "application/json",
        timeout_s: float = _REQUEST_S,
    ) -> Body:
        """One request, one JSON answer."""
        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=timeout_s)}
        if body is not None:
            options["data"] = msgspec.json.encode(body)
        with _mapped_errors():
            async with self._request(
                method, path, query, content_type=content_type, **options
            ) as response:
                await _require_success(response)
                answer: Body = msgspec.json.decode(await response.read())
                return answer

    def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        *,
        content_type: str = "application/json",
        **options: Any,
    ) -> Any:
        if self._session is None:
            raise RuntimeError("a Client is an asynchronous context: use `async with`")
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if token := self._access.token():
            headers["Authorization"] = f"Bearer {token}"
        url = self._access.server + path
        return self._session.request(method, url, params=query, headers=headers, **options)


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """What the network says, as KubeError."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable("the API server did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"the API server cannot be reached: {error}") from error
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"the API server answered nonsense: {error!r}") from error


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = await response.read()
    try:
        status = msgspec.json.decode(text)
        message, reason = str(status["message"]), str(status.get("reason", ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, reason = text[:200].decode(errors="replace"), ""
    raise error_of(response.status, message, reason)


def error_of(status: int, message: str, reason: str = "") -> KubeError:
    """The exception for an HTTP status."""
    kinds = {401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 410: Expired, 429: Unavailable}
    kind = kinds.get(status, Unavailable if status >= 500 else Rejected)
    return kind(message, status=status, reason=reason)


def _change(event: Body) -> Change:
    body = event["object"]
    if event["type"] == "ERROR":
        raise error_of(body.get("code", 500), body.get("message", ""), body.get("reason", ""))
    return Change(kind=ChangeKind(event["type"]), body=body)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own iterator gives up at 128 KiB."""
    rest = bytearray()
    async for chunk in content.iter_any():
        *lines, last = chunk.split(b"\n")
        for line in lines:
            rest += line
            if rest.strip():
                yield bytes(rest)
            rest = bytearray()
        rest += last


def _selectors(labels: str, fields: str) -> dict[str, str]:
    both = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in both.items() if value}


def _pause_s(failures: int) -> float:
    least, most = _BACKOFF_S
    pause_s: float = min(most, least * 2 ** min(failures - 1, 10))
    return pause_s * random.uniform(0.5, 1.0)


def _named(config: Body, kind: str, name: str) -> Body:
    for entry in config[f"{kind}s"]:
        if entry["name"] == name:
            found: Body = entry[kind]
            return found
    raise ValueError(f"no {kind} {name!r}")


def _ssl_of(cluster: Body, user: Body, directory: Path) -> ssl.SSLContext | None:
    if not cluster["server"].startswith("https:"):
        return None
    authority = _data(cluster, "certificate-authority", directory)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        raise ValueError("insecure-skip-tls-verify is not supported; name a certificate-authority")
    certificate = _data(user, "client-certificate", directory)
    key = _data(user, "client-key", directory)
    if certificate and key:
        with tempfile.NamedTemporaryFile(suffix=".pem") as both:  # load_cert_chain wants a file
            both.write(certificate + b"\n" + key)
            both.flush()
            context.load_cert_chain(both.name)
    return context


def _data(entry: Body, name: str, directory: Path) -> bytes | None:
    """What a kubeconfig gives inline in base64, or as a file relative to itself."""
    if inline := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(inline, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{name}-data: {error}") from error
    if file := entry.get(name):
        return directory.joinpath(str(file)).read_bytes()
    return None


def _token_of(user: Body, directory: Path) -> str | None:
    if file := user.get("tokenFile"):
        return directory.joinpath(str(file)).read_text().strip()
    token = user.get("token")
    return str(token) if token else None
