"""Requests by the official client, `kubernetes.aio`, without its models: objects are JSON.

The client's generated methods make a model for each field of each object, so a list of 10,000 pods
takes 36 s of CPU. Only its access, its connections and `ApiClient.call_api` are used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from yarl import URL

from keepstep.errors import UsageError
from keepstep_operator import __version__
from keepstep_operator.kube.errors import error_of, mapped_errors
from keepstep_operator.kube.resources import Patch, PatchType, Resource
from keepstep_operator.object_body import Body

MANAGER: Final = "keepstep-operator"
"""The name of our fields' owner, for `kubectl get --show-managed-fields`."""
_REQUEST_S: Final = 10.0
_PAGE: Final = "500"
_JSON: Final = "application/json"
_METADATA: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_WRITTEN: Final = {"fieldManager": MANAGER}


class _Metadata(msgspec.Struct, omit_defaults=True):
    """The only metadata that is decoded, because `managedFields` are most of a page."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Named(msgspec.Struct):
    metadata: _Metadata


class _Names(msgspec.Struct):
    metadata: dict[str, Any] = {}
    items: list[_Named] | None = None


def _names(data: bytes) -> Body:
    found: Body = msgspec.to_builtins(msgspec.json.decode(data, type=_Names))
    return found


class KubeClient:
    """An asynchronous context that owns the connections. Entering it raises UsageError if
    certificates cannot be used. All methods raise KubeError.

    `request_s`: how long an answer is waited for. `namespace=None` means a cluster-scoped object,
    or a collection over all namespaces.
    """

    def __init__(self, access: Configuration, *, request_s: float = _REQUEST_S) -> None:
        self._access = access
        self._request_s = request_s
        self._api: Any = None

    async def __aenter__(self) -> KubeClient:
        # otherwise each request uses two threads, to look for a ~/.netrc and for a proxy
        self._access.client_session_kwargs = {"trust_env": False}
        try:
            self._api = ApiClient(self._access)
        except OSError as error:
            raise UsageError(f"certificates for the API server cannot be used: {error}") from error
        self._api.user_agent = f"{MANAGER}/{__version__}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._api.close()

    async def get(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str | None = None,
        timeout_s: float | None = None,
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
        accept: str = _JSON,
        decode: Callable[[bytes], Body] = msgspec.json.decode,
    ) -> AsyncIterator[Body]:
        """Yields each object of a collection, which is read in pages. `labels`, `fields`:
        selectors."""
        path = resource.path(namespace=namespace)
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {name: selector for name, selector in selectors.items() if selector}
        query["limit"] = _PAGE
        while True:
            page = await self._call("GET", path, query=query, accept=accept, decode=decode)
            for item in page.get("items") or []:
                yield item
            query["continue"] = (page.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return

    async def list_metadata(self, resource: Resource, **where: Any) -> AsyncIterator[Body]:
        """As `list`, but of each object only the metadata in `_Metadata`."""
        async for body in self.list(resource, accept=_METADATA, decode=_names, **where):
            yield body

    async def create(self, resource: Resource, body: Body, *, namespace: str | None = None) -> Body:
        """Create the object. Raises Conflict if it exists."""
        path = resource.path(namespace=namespace)
        return await self._call("POST", path, query=_WRITTEN, body=body)

    async def replace(
        self, resource: Resource, body: Body, *, namespace: str | None = None
    ) -> Body:
        """PUT under the body's name. If the body has metadata.resourceVersion, raises Conflict if
        the object was written meanwhile."""
        path = resource.path(body["metadata"]["name"], namespace=namespace)
        return await self._call("PUT", path, query=_WRITTEN, body=body)

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
        return await self._call("PATCH", path, query=_WRITTEN, body=patch, content_type=kind.value)

    async def delete(
        self, resource: Resource, name: str, *, namespace: str | None = None, uid: str = ""
    ) -> Body:
        """Delete the object. `uid`: of the object that was read. Raises Conflict if another one has
        its name."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        path = resource.path(name, namespace=namespace)
        return await self._call("DELETE", path, body=options if uid else None)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float | None = None,
        query: dict[str, str] | None = None,
        body: Patch | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        decode: Callable[[bytes], Body] = msgspec.json.decode,
    ) -> Body:
        """Send one request; returns the decoded JSON answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._request_s)
        given = {"Accept": accept, "Content-Type": content_type}
        with mapped_errors():
            method, url, headers, content, _ = await self._api.param_serialize(
                method, path, {}, query, given, body, auth_settings=["BearerToken"]
            )
            target = URL(url, encoded=True)  # its parts are quoted already
            response = await self._api.call_api(
                method, target, headers, content, _request_timeout=timeout
            )
            await _require_success(response)
            return decode(await response.read())


async def _require_success(response: Any) -> None:
    if response.status < 400:
        return
    text = await response.read()
    try:
        status = msgspec.json.decode(text)
        message, reason = str(status["message"]), str(status.get("reason", ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, reason = text[:200].decode(errors="replace"), ""
    raise error_of(response.status, message, reason)
