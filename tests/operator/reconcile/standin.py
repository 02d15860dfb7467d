"""A stand-in for the API server: just enough of it over real HTTP, and it remembers what was asked.

The real one is met in tests/e2e; here it can be made to fail, and to say what a cluster would not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from keepstep.wire.reports import AUDIENCE
from keepstep_operator.kube import Access
from keepstep_operator.serving import listening
from tests.operator.apiserver import access_to

Body = dict[str, Any]


@dataclass
class Request:
    """What somebody asked."""

    method: str
    path: str
    body: Any
    query: dict[str, str]


@dataclass
class StandIn:
    """`objects`: by path of the object. `tokens`: token -> TokenReview.status. `broken`: how many
    more requests are answered with 503, of those whose path has `broken_part`. `forbidden`: those
    with this in their path are answered with 403."""

    objects: dict[str, Body] = field(default_factory=dict)
    tokens: dict[str, Body] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    broken: int = 0
    broken_part: str = ""
    forbidden: str = ""
    port: int = 0
    _watchers: list[tuple[str, str, asyncio.Queue[Body]]] = field(default_factory=list)

    @property
    def access(self) -> Access:
        return access_to(self.url, token="operator")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, method: str, part: str) -> list[Request]:
        return [one for one in self.requests if one.method == method and part in one.path]

    def watches(self, labels: str) -> bool:
        """Whether somebody follows what has these labels: an event before that reaches nobody."""
        return any(wanted == labels for _, wanted, _ in self._watchers)

    def add(self, path: str, body: Body) -> None:
        """Put an object there, and tell the watches."""
        kind = "MODIFIED" if path in self.objects else "ADDED"
        self.objects[path] = {**body, "metadata": {**body["metadata"], "resourceVersion": "2"}}
        self._tell(kind, path)

    def remove(self, path: str) -> None:
        self._tell("DELETED", path)
        del self.objects[path]

    def _tell(self, kind: str, path: str) -> None:
        for collection, labels, queue in self._watchers:
            if _collection(path) == collection and _matches(self.objects[path], labels):
                queue.put_nowait({"type": kind, "object": self.objects[path]})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[StandIn]:
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self._answer)])
        async with listening(app, port=0, host="127.0.0.1", shutdown_s=0.1) as self.port:
            yield self

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.read()
        body = json.loads(text) if text else None
        self.requests.append(Request(request.method, request.path, body, dict(request.query)))
        if self.broken > 0 and self.broken_part in request.path:
            self.broken -= 1
            return _failure(503, "out of order")
        if self.forbidden and self.forbidden in request.path:
            return _failure(403, "forbidden")
        if request.path.endswith("/tokenreviews"):
            return self._review(body)
        if request.method == "GET":
            return await self._read(request)
        return self._write(request.method, request.path, body)

    def _review(self, body: Body) -> web.Response:
        assert body["spec"]["audiences"] == [AUDIENCE]
        status = self.tokens.get(body["spec"]["token"], {"authenticated": False})
        return web.json_response({**body, "status": status}, status=201)

    async def _read(self, request: web.Request) -> web.StreamResponse:
        path, labels = request.path, request.query.get("labelSelector", "")
        if request.query.get("watch"):
            return await self._watch(request, labels)
        if path in self.objects:
            return web.json_response(self.objects[path])
        name = path.rsplit("/", 1)[1]
        if name not in ("pods", "nodes", "checkpointpolicies", "checkpointruns", "checkpoints"):
            return _failure(404, f"{path} not found")
        items = [
            body
            for key, body in self.objects.items()
            if _collection(key) == path and _matches(body, labels)
        ]
        return _page(items, request.query)

    async def _watch(self, request: web.Request, labels: str) -> web.StreamResponse:
        queue: asyncio.Queue[Body] = asyncio.Queue()
        self._watchers.append((request.path, labels, queue))
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(json.dumps(await queue.get()).encode() + b"\n")

    def _write(self, method: str, path: str, body: Any) -> web.Response:
        if method == "POST":
            return self._create(path, body)
        target = path.removesuffix("/status")
        if target not in self.objects:
            return _failure(404, f"{target} not found")
        if method == "DELETE":
            self.remove(target)
            return web.json_response({"kind": "Status", "status": "Success"})
        if isinstance(body, list):
            assert body[0]["path"] == "/status"
            self.objects[target]["status"] = body[0]["value"]
        else:
            _merge(self.objects[target], body)
        self._tell("MODIFIED", target)
        return web.json_response(self.objects[target])

    def _create(self, path: str, body: Body) -> web.Response:
        target = f"{path}/{body['metadata']['name']}"
        if target in self.objects:
            return _failure(409, "already exists")
        body["metadata"]["uid"] = f"uid-of-{body['metadata']['name']}"
        self.add(target, body)
        return web.json_response(body, status=201)


def _page(items: list[Body], query: Mapping[str, str]) -> web.Response:
    """As many as the limit allows, and where to go on."""
    first, limit = int(query.get("continue") or 0), int(query.get("limit") or len(items) or 1)
    metadata = {"resourceVersion": "1"}
    if first + limit < len(items):
        metadata["continue"] = str(first + limit)
    return web.json_response({"metadata": metadata, "items": items[first : first + limit]})


def _failure(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=status)


def _collection(path: str) -> str:
    """The path of a list over all namespaces."""
    root, _, rest = path.partition("/namespaces/")
    if not rest:
        return path.rpartition("/")[0]
    return f"{root}/{rest.split('/')[1]}"


def _matches(body: Body, selector: str) -> bool:
    """`a`, `!a`, joined by commas."""
    labels = body["metadata"].get("labels") or {}
    return all(
        (part[1:] not in labels) if part.startswith("!") else part in labels
        for part in filter(None, selector.split(","))
    )


def _merge(into: Body, patch: Body) -> None:
    for name, value in patch.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


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


def pod_path(name: str, namespace: str = "team") -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def pod_body(node_rank: int = 0, *, injected: bool = True) -> Body:
    """A PyTorchJob's pod as the API server has it, after admission or without."""
    said = {
        "policy": "default",
        "generation": 1,
        "image": "keepstep/sidecar:0.1.0",
        "version": "0.1.0",
        "container": "pytorch",
        "job": {
            "api_version": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": "gpt",
            "uid": "1a2b3c4d-0000",
        },
    }
    labels = {"training.kubeflow.org/job-name": "gpt"}
    annotations = {"keepstep.dev/policy": "default"}
    if injected:
        labels |= {
            "keepstep.dev/injected": "true",
            "keepstep.dev/run-key": "gpt-1a2b3c4d",
            "keepstep.dev/node-rank": str(node_rank),
        }
        annotations["keepstep.dev/status"] = json.dumps(said)
    return {
        "metadata": {
            "name": f"gpt-worker-{node_rank}",
            "namespace": "team",
            "uid": f"pod-{node_rank}",
            "resourceVersion": "1",
            "creationTimestamp": "2026-11-21T07:00:00Z",
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": "gpt",
                    "uid": "1a2b3c4d-0000",
                    "controller": True,
                }
            ],
            "managedFields": [{"fieldsV1": {"f:metadata": {}}}],
        },
        "spec": {
            "nodeName": f"node-{node_rank}",
            "initContainers": [{"name": "keepstep-sidecar", "env": []}] if injected else [],
            "containers": [
                {
                    "name": "pytorch",
                    "image": "team/train:1",
                    "env": [{"name": "RANK", "value": str(node_rank)}],
                    "command": ["python", "train.py"],
                }
            ],
            "volumes": [
                {"name": "keepstep-memory", "emptyDir": {"medium": "Memory"}},
                {"name": "keepstep-volume-nvme0", "hostPath": {"path": "/mnt/nvme0"}},
            ],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "pytorch", "restartCount": 0, "state": {"running": {"startedAt": "x"}}}
            ],
        },
    }
