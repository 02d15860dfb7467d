"""A small API server over real HTTP: objects with resource versions, selections, pages, watches,
conflicts, patches of every kind, token reviews. It remembers what was asked.

It stands in for a cluster where a test needs to say exactly when something changes, fails or is
slow. tests/e2e runs the same code against a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from jsonpatch import JsonPatchTestFailed, apply_patch
from kubernetes.aio.client import Configuration

from keepstep.wire.member_reports import AUDIENCE
from keepstep_operator.kube.resources import POLICIES, Resource
from keepstep_operator.serving import serve_application

Body = dict[str, Any]
TOKEN = "operator"
_CORE = (
    "pods", "nodes", "namespaces", "configmaps", "secrets", "events", "limitranges",
    "resourcequotas", "services",
)  # fmt: skip
_OURS = ("checkpointpolicies", "checkpointruns", "checkpoints")
_OTHERS = ("mutatingwebhookconfigurations", "deployments")
_GROUP, _VERSION = "keepstep.dev", "v1alpha1"


@dataclass(frozen=True)
class Request:
    """What somebody asked. `target`: path and query as they came, with nothing decoded."""

    method: str
    path: str
    body: Any
    query: dict[str, str]
    target: str


@dataclass
class _Watch:
    """Somebody who watches a collection, or, of it, what has these labels."""

    collection: str
    labels: str
    events: asyncio.Queue[Body | None] = field(default_factory=asyncio.Queue)

    def notify(self, kind: str, path: str, body: Body, before: Body | None) -> None:
        """As the real one: what does not match any more is gone for those who asked for a match."""
        if not is_of(self.collection, path):
            return
        was = before is not None and matches(before, self.labels)
        if matches(body, self.labels):
            kind = "ADDED" if kind == "MODIFIED" and not was else kind
            self.events.put_nowait({"type": kind, "object": deepcopy(body)})
        elif was:
            self.events.put_nowait({"type": "DELETED", "object": deepcopy(body)})


@dataclass
class ApiServer:
    """`objects`: by path. `tokens`: token -> TokenReview.status.
    `forwards`: by path of the pod, the port of this machine that its port is. Tests may set
    `delay_s` (before each answer but those of watches), `down` (503 to everything), `broken` (how
    many more requests are answered with 503, of those whose path has `broken_part`), `forbidden`
    (403 to paths with it), and `before` (called with method and path before a request is looked
    at)."""

    objects: dict[str, Body] = field(default_factory=dict)
    tokens: dict[str, Body] = field(default_factory=dict)
    forwards: dict[str, int] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    delay_s: float = 0.0
    down: bool = False
    broken: int = 0
    broken_part: str = ""
    forbidden: str = ""
    before: Callable[[str, str], None] = lambda method, path: None
    port: int = 0
    _version: int = 100
    _oldest: int = 0
    _history: list[tuple[str, str, Body, Body | None]] = field(default_factory=list)
    _watches: list[_Watch] = field(default_factory=list)
    _pages: dict[tuple[str, str], list[Body]] = field(default_factory=dict)

    # --- how it is reached -------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def access(self) -> Configuration:
        return Configuration(host=self.url, api_key={"BearerToken": f"Bearer {TOKEN}"})

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
        async with serve_application(app, port=0, host="127.0.0.1", shutdown_s=0.1) as self.port:
            try:
                yield self
            finally:
                self.end_watches()

    # --- what tests do to it, and ask --------------------------------------------------------

    def put(self, resource: Resource, body: Body) -> Body:
        """Create or replace, and tell the watches."""
        namespace = body["metadata"].get("namespace")
        path = resource.path(body["metadata"]["name"], namespace=namespace)
        return self.add(path, body)

    def add(self, path: str, body: Body) -> Body:
        """The same by path."""
        return self._store(path, deepcopy(body))

    def take(self, resource: Resource, name: str, *, namespace: str | None = None) -> Body:
        """The object as it is now."""
        return self.objects[resource.path(name, namespace=namespace)]

    def delete(self, resource: Resource, name: str, *, namespace: str | None = None) -> None:
        self.remove(resource.path(name, namespace=namespace))

    def remove(self, path: str) -> None:
        """Delete it, and tell the watches."""
        body = deepcopy(self.objects.pop(path))
        self._notify("DELETED", path, self._versioned(body), body)

    def calls(self) -> list[tuple[str, str]]:
        """Method and path of every request."""
        return [(request.method, request.path) for request in self.requests]

    def asked(self, method: str, part: str) -> list[Request]:
        return [
            request
            for request in self.requests
            if request.method == method and part in request.path
        ]

    def lists(self, labels: str) -> bool:
        """Whether somebody has listed what has these labels."""
        return any(request.query.get("labelSelector") == labels for request in self.requests)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is done meanwhile no watch is told, not even later."""
        watches, self._watches = self._watches, []
        history = list(self._history)
        yield
        self._watches, self._history = watches, history

    def watches(self, labels: str | None = None) -> bool:
        """Whether somebody follows what has these labels, or anything."""
        return any(labels in (None, watch.labels) for watch in self._watches)

    def end_watches(self) -> None:
        """As the server does after timeoutSeconds."""
        for watch in self._watches:
            watch.events.put_nowait(None)

    # --- answering ---------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text, method, path = await request.read(), request.method, request.path
        body = json.loads(text) if text else None
        query = dict(request.query)
        self.requests.append(Request(method, path, body, query, request.raw_path))
        self.before(method, path)
        if (refused := self._refused(request)) is not None:
            return refused
        if (known := discovery(path)) is not None:
            return web.json_response(known)
        if query.get("watch"):
            return await self._watch(request)
        await asyncio.sleep(self.delay_s)
        if (port := self.forwards.get(path.removesuffix("/portforward"))) is not None:
            return await self._forward(request, port)
        if method == "GET":
            return self._get(path, query)
        if path.endswith("/tokenreviews"):
            return self._review(body)
        return self._write(method, path, body, request)

    def _refused(self, request: web.Request) -> web.Response | None:
        path = request.path
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "no token")
        if self.forbidden and self.forbidden in path:
            return _status(403, "Forbidden", "no role says so")
        if self.broken > 0 and self.broken_part in path:
            self.broken -= 1
            return _status(503, "ServiceUnavailable", "out of order")
        return _status(503, "ServiceUnavailable", "etcd is away") if self.down else None

    def _get(self, path: str, query: Mapping[str, str]) -> web.Response:
        if path in self.objects:
            return web.json_response(self.objects[path])
        if not _is_collection(path):
            return _status(404, "NotFound", f"{path} not found")
        labels = query.get("labelSelector", "")
        found = self._pages.pop((path, labels), None) if query.get("continue") else None
        if found is None:
            start = path if "/namespaces/" in path else path.rpartition("/")[0]
            found = [
                body
                for at, body in self.objects.items()
                if at.startswith(start) and is_of(path, at) and matches(body, labels)
            ]
        first, limit = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(found)
        metadata = {"resourceVersion": str(self._version)}
        if first + limit < len(found):
            metadata["continue"] = str(first + limit)
            self._pages[path, labels] = found  # all pages are of one moment
        items = found[first : first + limit]
        return web.json_response({"kind": "List", "metadata": metadata, "items": items})

    def _review(self, body: Body) -> web.Response:
        audiences = body["spec"].get("audiences", [])
        assert audiences in ([AUDIENCE], [])
        status = self.tokens.get(body["spec"]["token"], {"authenticated": False})
        if audiences != [AUDIENCE] and audiences != status.get("audiences", []):
            status = {"authenticated": False, "error": "for another audience"}
        return web.json_response({**body, "status": status}, status=201)

    async def _forward(self, request: web.Request, port: int) -> web.StreamResponse:
        """A port of a pod, by the protocol of websockets: data on channel 0, errors on 1."""
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        asked = int(request.query["ports"]).to_bytes(2, "little")
        for channel in (b"\0", b"\1"):
            await socket.send_bytes(channel + asked)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def answer() -> None:
            with suppress(ConnectionError):
                while data := await reader.read(4096):
                    await socket.send_bytes(b"\0" + data)
                await socket.close()

        answering = asyncio.create_task(answer())
        try:
            async for message in socket:
                writer.write(message.data[1:])
        finally:
            answering.cancel()
            writer.close()
        return socket

    def _write(self, method: str, path: str, body: Any, request: web.Request) -> web.Response:
        if method == "POST":
            return self._create(f"{path}/{body['metadata']['name']}", body)
        at = path.removesuffix("/status")
        old = self.objects.get(at)
        if old is None:
            return _status(404, "NotFound", f"{at} not found")
        if method == "DELETE":
            for name, expected in ((body or {}).get("preconditions") or {}).items():
                if expected != old["metadata"].get(name):
                    return _status(409, "Conflict", f"the {name} in the precondition is another")
            self.remove(at)
            return web.json_response(old)
        if method == "PUT":
            expected = body["metadata"].get("resourceVersion")
            if expected not in (None, old["metadata"]["resourceVersion"]):
                return _status(409, "Conflict", "the object has been modified")
            return web.json_response(self._store(at, body))
        if request.content_type == "application/json-patch+json":
            try:
                new = apply_patch(old, body)
            except JsonPatchTestFailed:
                return _status(422, "Invalid", "the test failed")
        else:
            new = _merged(old, body)
        return web.json_response(self._store(at, new))

    def _create(self, path: str, body: Body) -> web.Response:
        if path in self.objects:
            return _status(409, "AlreadyExists", f"{path} exists")
        body["metadata"].setdefault("uid", f"uid-of-{body['metadata']['name']}-{self._version}")
        return web.json_response(self._store(path, body), status=201)

    # --- versions and watches ----------------------------------------------------------------

    def _versioned(self, body: Body) -> Body:
        self._version += 1
        body["metadata"] = {**body["metadata"], "resourceVersion": str(self._version)}
        return body

    def _store(self, path: str, body: Body) -> Body:
        before = self.objects.get(path)
        self.objects[path] = self._versioned(body)
        self._notify("ADDED" if before is None else "MODIFIED", path, body, before)
        return body

    def _notify(self, kind: str, path: str, body: Body, before: Body | None) -> None:
        self._history.append((kind, path, deepcopy(body), deepcopy(before)))
        for watch in self._watches:
            watch.notify(kind, path, body, before)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        entry = _Watch(request.path, request.query.get("labelSelector", ""))
        since = int(request.query["resourceVersion"])
        if since < self._oldest:
            gone = _status_body(410, "Expired", "too old resource version")
            entry.events.put_nowait({"type": "ERROR", "object": gone})
        for kind, path, body, before in self._history:
            if int(body["metadata"]["resourceVersion"]) > since >= self._oldest:
                entry.notify(kind, path, body, before)
        if request.query.get("allowWatchBookmarks") == "true":
            metadata = {"resourceVersion": str(self._version)}
            entry.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": metadata}})
        self._watches.append(entry)
        response = web.StreamResponse()
        try:
            with suppress(ConnectionResetError):
                await response.prepare(request)
                while (event := await entry.events.get()) is not None:
                    await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watches[:] = [watch for watch in self._watches if watch is not entry]
        return response


def discovery(path: str) -> Body | None:
    """What the server says of its kinds; None where `path` is about something else."""
    version = {"groupVersion": f"{_GROUP}/{_VERSION}", "version": _VERSION}
    group = {"name": _GROUP, "versions": [version], "preferredVersion": version}
    known: dict[str, Body] = {
        "/api": {"versions": ["v1"]},
        "/apis": {"groups": [group]},
        "/api/v1": {"resources": [_kind(plural) for plural in _CORE]},
        f"/apis/{_GROUP}/{_VERSION}": {
            "resources": [_kind(plural + part) for plural in _OURS for part in ("", "/status")]
        },
    }
    return known.get(path)


def _kind(plural: str) -> Body:
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    kind = {"name": plural, "singularName": "", "kind": plural.title(), "verbs": verbs}
    return {**kind, "namespaced": plural not in ("nodes", "namespaces")}


def bound_to(namespace: str, pod_name: str, pod_uid: str) -> Body:
    """TokenReview.status of a good token of this pod."""
    return {
        "authenticated": True,
        "audiences": [AUDIENCE],
        "user": {
            "username": f"system:serviceaccount:{namespace}:default",
            "extra": {
                "authentication.kubernetes.io/pod-name": [pod_name],
                "authentication.kubernetes.io/pod-uid": [pod_uid],
            },
        },
    }


def put_policy(server: ApiServer, body: Body) -> None:
    server.put(POLICIES, body)


def is_of(collection: str, path: str) -> bool:
    """Whether the object at `path` is in `collection`, which may be over all namespaces."""
    parent, _ = path.rsplit("/", 1)
    prefix, plural = collection.rsplit("/", 1)
    return parent == collection or (
        parent.startswith(f"{prefix}/namespaces/") and parent.endswith(f"/{plural}")
    )


def matches(body: Body, selector: str) -> bool:
    """`a`, `!a`, `a=b`, joined by commas."""
    labels = body["metadata"].get("labels") or {}
    return all(_matches(labels, part) for part in filter(None, selector.split(",")))


def _matches(labels: Mapping[str, str], part: str) -> bool:
    name, equals, value = part.removeprefix("!").partition("=")
    return labels.get(name) == value if equals else (name in labels) != part.startswith("!")


def _status_body(code: int, reason: str, message: str) -> Body:
    return {"kind": "Status", "code": code, "reason": reason, "message": message}


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status_body(code, reason, message), status=code)


def _is_collection(path: str) -> bool:
    """Of a kind that it knows; a namespace's too."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    parts = parts[2:] if parts[0] == "namespaces" and len(parts) == 3 else parts
    return len(parts) == 1 and parts[0] in (*_CORE, *_OURS, *_OTHERS)


def _merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    base = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            base.pop(name, None)
        else:
            base[name] = _merged(base.get(name), value)
    return base
