"""Requests by the official client, `kubernetes.aio`, without its models: objects are JSON.

Its generated methods make one for each field of each object: a list of 10,000 pods is then 36 s of
CPU. What is used of it is access, connections and `ApiClient.call_api`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from yarl import URL

from keepstep.errors import UsageError
from keepstep_operator import __version__
from keepstep_operator.bodies import Body
from keepstep_operator.kube.access import Access
from keepstep_operator.kube.errors import Expired, KubeError, error_of, mapped_errors
from keepstep_operator.kube.resources import Change, ChangeKind, Listing, Patch, PatchType, Resource

MANAGER: Final = "keepstep-operator"
"""Who wrote which field, for `kubectl get --show-managed-fields`."""
_REQUEST_S: Final = 10.0
_WATCH_S: Final = 240
"""The server ends a watch after so long, and we ask for the next one: a connection that died
without a word is noticed."""
SILENT_S: Final = 80.0
"""A watch that says nothing for so long is dead: bookmarks come every minute."""
_LEAST_WATCH_S: Final = 1.0
_LONGEST_RETRY_AFTER_S: Final = 60.0
_BACKOFF_S: Final = (0.5, 15.0)
_WRITTEN: Final = {"fieldManager": MANAGER}


class Client:
    """An asynchronous context that owns the connections; entering raises UsageError. All methods
    raise KubeError.

    `namespace=None` means a cluster-scoped object, or a collection over all namespaces.
    """

    _page = 500

    def __init__(self, access: Access) -> None:
        self._access = access
        self._api: Any = None

    async def __aenter__(self) -> Client:
        try:
            self._api = ApiClient(self._access.configuration)
        except OSError as error:
            raise UsageError(f"certificates for the API server cannot be used: {error}") from error
        self._api.user_agent = f"{MANAGER}/{__version__}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._api.close()

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
        query = {"limit": str(self._page), **_selectors(labels, fields)}
        while True:
            page = await self._call("GET", path, query=query)
            with mapped_errors():
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
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_S, sock_read=SILENT_S)
        with mapped_errors():
            path = resource.path(namespace=namespace)
            response = await self._send("GET", path, query, timeout=timeout)
            async with response.response as answer:
                await _require_success(response)
                try:
                    async for line in _lines(answer.content):
                        yield _change(msgspec.json.decode(line))
                except TimeoutError:
                    return  # a dead connection: the next watch goes on from the last version

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
        failures, wanted_s = 0, 0.0
        while True:
            async for event in self._followed(resource, where):
                yield event
                failures = failures + 1 if isinstance(event, KubeError) else 0
                wanted_s = event.retry_after_s if isinstance(event, KubeError) else 0.0
            if failures:
                await asyncio.sleep(max(_pause_s(failures), wanted_s))

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
        path = resource.path(namespace=namespace)
        return await self._call("POST", path, query=_WRITTEN, body=body)

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
        path = resource.path(*parts, namespace=namespace)
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

    async def apply(
        self,
        resource: Resource,
        body: Body,
        *,
        manager: str,
        namespace: str | None = None,
        subresource: str = "",
    ) -> Body:
        """Server-side apply: the fields in `body` are `manager`'s, whoever had them before, and
        what it applied before and is not in there any more goes."""
        parts = (body["metadata"]["name"], *filter(None, [subresource]))
        path = resource.path(*parts, namespace=namespace)
        query, kind = {"fieldManager": manager, "force": "true"}, PatchType.APPLY.value
        return await self._call("PATCH", path, query=query, body=body, content_type=kind)

    async def delete(
        self, resource: Resource, name: str, *, namespace: str | None = None, uid: str = ""
    ) -> Body:
        """`uid`: of the object that was looked at; raises Conflict when another has its name."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        path = resource.path(name, namespace=namespace)
        return await self._call("DELETE", path, body=options if uid else None)

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
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with mapped_errors():
            response = await self._send(
                method, path, query, body=body, content_type=content_type, timeout=timeout
            )
            await _require_success(response)
            answer: Body = msgspec.json.decode(await response.read())
            return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        *,
        timeout: aiohttp.ClientTimeout,
        body: Patch | None = None,
        content_type: str = "application/json",
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        method, url, headers, body, _ = await self._api.param_serialize(
            method, path, {}, query, headers, body, auth_settings=["BearerToken"]
        )
        target = URL(url, encoded=True)  # its parts are quoted already, and stay as they are
        return await self._api.call_api(method, target, headers, body, _request_timeout=timeout)


async def _require_success(response: Any) -> None:
    if response.status < 400:
        return
    text = await response.read()
    try:
        status = msgspec.json.decode(text)
        message, reason = str(status["message"]), str(status.get("reason", ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, reason = text[:200].decode(errors="replace"), ""
    after_s = _retry_after_s(response.headers.get("Retry-After", ""))
    raise error_of(response.status, message, reason, retry_after_s=after_s)


def _retry_after_s(text: str) -> float:
    """The API server writes seconds."""
    return min(float(text), _LONGEST_RETRY_AFTER_S) if text.isascii() and text.isdigit() else 0.0


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
