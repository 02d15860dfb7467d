"""A small API server over real HTTP: objects with resource versions, watches, conflicts, patches.

It stands in for a cluster where a test needs to say exactly when something changes, fails or is
slow. tests/e2e runs the same code against a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from kubernetes.aio.client import Configuration

from keepstep_operator.kube import POLICIES, Access, Resource
from keepstep_operator.serving import listening
from tests.operator.injection.json_pointer import apply

Body = dict[str, Any]
TOKEN = "a-token"


def access_to(url: str, *, token: str, namespace: str = "default") -> Access:
    configuration = Configuration(host=url, api_key={"BearerToken": f"Bearer {token}"})
    return Access(configuration=configuration, namespace=namespace)


class ApiServer:
    """Objects by path. `requests`: every method and path that came. Tests may set `delay_s` (before
    each answer but those of watches), `down` (503 to everything), and `before` (called with method
    and path before a request is looked at)."""

    def __init__(self) -> None:
        self.objects: dict[str, Body] = {}
        self.requests: list[tuple[str, str]] = []
        self.delay_s = 0.0
        self.down = False
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.port = 0
        self._version = 100
        self._history: list[tuple[str, Body]] = []
        self._watches: list[tuple[str, asyncio.Queue[Body | None]]] = []

    @property
    def access(self) -> Access:
        return access_to(self.url, token=TOKEN, namespace="keepstep-system")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self, directory: Path) -> Path:
        """For processes: KUBECONFIG."""
        config = {
            "current-context": "test",
            "contexts": [
                {"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "n"}}
            ],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ApiServer]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        async with listening(app, port=0, host="127.0.0.1", shutdown_s=0.1) as self.port:
            try:
                yield self
            finally:
                self.end_watches()

    def put(self, resource: Resource, body: Body) -> Body:
        """Create or replace, and tell the watches."""
        namespace = body["metadata"].get("namespace")
        path = resource.path(body["metadata"]["name"], namespace=namespace)
        return self._store(path, deepcopy(body))

    def take(self, resource: Resource, name: str, *, namespace: str | None = None) -> Body:
        """The object as it is now."""
        return self.objects[resource.path(name, namespace=namespace)]

    def delete(self, resource: Resource, name: str, *, namespace: str | None = None) -> None:
        self._forget(resource.path(name, namespace=namespace))

    def _forget(self, path: str) -> None:
        body = self.objects.pop(path)
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._tell("DELETED", path, body)

    def end_watches(self) -> None:
        """As the server does after timeoutSeconds."""
        for _, queue in self._watches:
            queue.put_nowait(None)

    def expire_watches(self) -> None:
        """As etcd's compaction does: what happened meanwhile is gone."""
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        for _, queue in self._watches:
            queue.put_nowait({"type": "ERROR", "object": gone})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        method, path = request.method, request.path
        self.requests.append((method, path))
        self.before(method, path)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "no token")
        if self.down:
            return _status(503, "ServiceUnavailable", "etcd is away")
        if request.query.get("watch"):
            return await self._watch(request)
        await asyncio.sleep(self.delay_s)
        body = json.loads(await request.read() or b"null")
        if method == "GET":
            return self._get(path)
        return self._write(method, path, body, request.content_type)

    def _get(self, path: str) -> web.Response:
        if path in self.objects:
            return web.json_response(self.objects[path])
        plural = path.rsplit("/", 1)[-1]
        if plural.endswith("s") and "/" in path and _is_collection(path):
            items = [one for at, one in self.objects.items() if _collects(path, at)]
            metadata = {"resourceVersion": str(self._version)}
            return web.json_response({"kind": "List", "metadata": metadata, "items": items})
        return _status(404, "NotFound", f"{path} not found")

    def _write(self, method: str, path: str, body: Any, content_type: str) -> web.Response:
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return _status(409, "AlreadyExists", f"{path} exists")
            body["metadata"].setdefault("uid", f"{path}-{self._version}")
        elif path not in self.objects:
            return _status(404, "NotFound", f"{path} not found")
        if method == "DELETE":
            gone = self.objects[path]
            self._forget(path)
            return web.json_response(gone)
        old = self.objects.get(path, {})
        if method == "PUT":
            wanted = body["metadata"].get("resourceVersion")
            if wanted not in (None, old["metadata"]["resourceVersion"]):
                return _status(409, "Conflict", "the object has been modified")
        if method == "PATCH" and content_type == "application/merge-patch+json":
            body = {**deepcopy(old), **body}
        elif method == "PATCH":
            assert content_type == "application/json-patch+json"
            tests = [one for one in body if one["op"] == "test"]
            if any(_at(old, one["path"]) != one["value"] for one in tests):
                return _status(422, "Invalid", "the test failed")
            body = apply(old, [one for one in body if one["op"] != "test"])
        return web.json_response(self._store(path, body))

    def _store(self, path: str, body: Body) -> Body:
        self._version += 1
        kind = "MODIFIED" if path in self.objects else "ADDED"
        body["metadata"]["resourceVersion"] = str(self._version)
        self.objects[path] = body
        self._tell(kind, path, body)
        return body

    def _tell(self, kind: str, path: str, body: Body) -> None:
        event = {"type": kind, "object": deepcopy(body)}
        self._history.append((path, event))
        for collection, queue in self._watches:
            if _collects(collection, path):
                queue.put_nowait(event)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[Body | None] = asyncio.Queue()
        entry = (request.path, queue)
        since = int(request.query["resourceVersion"])
        for path, event in self._history:
            version = int(event["object"]["metadata"]["resourceVersion"])
            if _collects(request.path, path) and version > since:
                queue.put_nowait(event)
        self._watches.append(entry)
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            while (told := await queue.get()) is not None:
                await response.write(json.dumps(told).encode() + b"\n")
        except ConnectionResetError:
            pass
        finally:
            self._watches.remove(entry)
        return response


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)


def _is_collection(path: str) -> bool:
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    return len(parts) == 1 or (parts[0] == "namespaces" and len(parts) == 3)


def _collects(collection: str, path: str) -> bool:
    """Whether the object at `path` is in `collection`, which may be over all namespaces."""
    parent, _ = path.rsplit("/", 1)
    prefix, plural = collection.rsplit("/", 1)
    return parent == collection or (
        parent.startswith(f"{prefix}/namespaces/") and parent.endswith(f"/{plural}")
    )


def _at(document: Any, pointer: str) -> Any:
    for part in pointer.strip("/").split("/"):
        document = document[int(part)] if isinstance(document, list) else document.get(part)
    return document


def put_policy(server: ApiServer, body: Body) -> None:
    server.put(POLICIES, body)
