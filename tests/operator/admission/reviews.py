"""AdmissionReviews as an API server sends them, over real TLS."""

from __future__ import annotations

import base64
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
from jsonpatch import apply_patch

from keepstep_operator.certificates.pki import KeyPair

Body = dict[str, Any]
NAME = "keepstep-admission.keepstep-system.svc"


def review_of(pod: Body, *, uid: str = "705ab4f5-6393-11e8-b7cc-42010a800002") -> Body:
    """The request for the creation of `pod`, with what an API server of v1.31 puts beside it."""
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": uid,
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "name": pod["metadata"].get("name", ""),
            "namespace": pod["metadata"].get("namespace", "team-a"),
            "operation": "CREATE",
            "userInfo": {
                "username": "system:serviceaccount:kubeflow:training-operator",
                "groups": ["system:serviceaccounts", "system:authenticated"],
            },
            "object": pod,
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    }


class ApiServersWebhook:
    """The client half of a webhook: posts reviews, checks the certificate, applies patches."""

    def __init__(self, port: int, *, bundle: bytes) -> None:
        self._url = f"https://127.0.0.1:{port}"
        self._trust = ssl.create_default_context(cadata=bundle.decode())
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiServersWebhook:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._trust))
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def post(self, review: Body) -> Body:
        """The answer's `response`; it is for this review, lets the pod pass, and ends its
        connection, so that the API server keeps none to a replica that may be lost."""
        assert self._session is not None
        async with self._session.post(
            f"{self._url}/inject?timeout=5s", json=review, server_hostname=NAME
        ) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["Connection"] == "close"
            body = json.loads(await answer.read())
        assert (body["apiVersion"], body["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: Body = body["response"]
        assert response["uid"] == review["request"]["uid"]
        assert response["allowed"] is True
        return response

    async def create(self, pod: Body) -> tuple[Body, list[str]]:
        """The pod as it would be stored, and the warnings that its creator sees."""
        response = await self.post(review_of(pod))
        warnings: list[str] = response.get("warnings", [])
        if "patch" not in response:
            return pod, warnings
        assert response["patchType"] == "JSONPatch"
        return apply_patch(pod, base64.b64decode(response["patch"]).decode()), warnings

    async def raw(self, data: bytes, *, path: str = "/inject") -> tuple[int, str]:
        """Status and text of the answer to anything."""
        assert self._session is not None
        async with self._session.post(self._url + path, data=data, server_hostname=NAME) as answer:
            return answer.status, await answer.text()

    async def get(self, path: str) -> tuple[int, str]:
        assert self._session is not None
        async with self._session.get(self._url + path, server_hostname=NAME) as answer:
            return answer.status, await answer.text()


def write_pair(directory: Path, pair: KeyPair) -> Path:
    """As the kubelet mounts a Secret."""
    directory.mkdir(exist_ok=True)
    (directory / "tls.crt").write_bytes(pair.certificate)
    (directory / "tls.key").write_bytes(pair.key)
    return directory
