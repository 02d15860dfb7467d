"""What tests look at, asked of the API server without a process, over connections that stay open:
kubectl takes a tenth of a second of a core, a handshake 3 ms, and tests look twice a second. What
tests do is done by kubectl, as users do it."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_TIMEOUT_S = 30.0
_AGAIN = (429, 500, 503, 504)
"""Such an answer says nothing about the object: the store is slow, or elects a leader."""
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


@dataclass(frozen=True)
class Kind:
    """Where objects of a kind are."""

    root: str
    resource: str
    namespaced: bool

    def path(self, namespace: str) -> str:
        """Of all objects of a namespace; "" is the default one."""
        within = f"/namespaces/{namespace or 'default'}" if self.namespaced else ""
        return f"{self.root}{within}/{self.resource}"


class Api:
    """The API server that a kubeconfig names, with the certificates in it."""

    def __init__(self, kubeconfig: Path) -> None:
        self._known: dict[str, Kind] = {}
        body = yaml.safe_load(kubeconfig.read_text())
        (cluster,), (user,) = body["clusters"], body["users"]
        self._context = ssl.create_default_context(
            cadata=_pem(cluster["cluster"]["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as file:
            for part in ("client-certificate-data", "client-key-data"):
                file.write(_pem(user["user"][part]))
            file.flush()
            self._context.load_cert_chain(file.name)
        self._host = urllib.parse.urlsplit(cluster["cluster"]["server"]).netloc
        self._idle: list[http.client.HTTPSConnection] = []

    def get(self, path: str, *, accept: str = "application/json", **query: str) -> str | None:
        """The answer, None where nothing is there. Raises RuntimeError for any other. As kubectl
        does, it asks again where the API server says so: it prepares the storage of a kind anew
        when its CRD has changed."""
        deadline = time.monotonic() + _TIMEOUT_S
        asked = f"?{urllib.parse.urlencode(query)}" if query else ""
        while True:
            kept = self._idle.pop() if self._idle else None
            connection = kept or http.client.HTTPSConnection(
                self._host, context=self._context, timeout=_TIMEOUT_S
            )
            try:
                connection.request("GET", f"{path}{asked}", headers={"Accept": accept})
                answer = connection.getresponse()
                body_text = answer.read().decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if kept is None or isinstance(error, TimeoutError):  # else it was closed long ago
                    raise RuntimeError(f"{path}: {error}") from error
                continue
            self._idle.append(connection)
            if answer.status not in _AGAIN or time.monotonic() >= deadline:
                break
            time.sleep(float(answer.headers.get("Retry-After", 1)))
        if answer.status == 404:
            return None
        if answer.status >= 400:
            raise RuntimeError(f"{path}: {answer.status} {body_text[-1000:]}")
        return body_text

    def path(self, kind: str, namespace: str) -> str:
        """Of all objects of a kind, by any of the names that kubectl takes."""
        if kind not in self._known:
            self._known = self._kinds()  # it may have come since
        if kind not in self._known:
            raise RuntimeError(f"the API server has no {kind}")
        return self._known[kind].path(namespace)

    def _kinds(self) -> dict[str, Kind]:
        """Every name of every kind, the first group's where two have the same, as kubectl does."""
        found: dict[str, Kind] = {}
        for root in ("/api", "/apis"):
            groups: list[dict[str, Any]]
            groups = json.loads(self.get(root, accept=_DISCOVERY) or "{}").get("items", [])
            for group in groups:
                within = "/".join(filter(None, (root, group["metadata"].get("name"))))
                version = group["versions"][0]
                for resource in version["resources"]:
                    kind = Kind(
                        root=f"{within}/{version['version']}",
                        resource=resource["resource"],
                        namespaced=resource["scope"] == "Namespaced",
                    )
                    names = (
                        resource["resource"],
                        resource["singularResource"],
                        *resource.get("shortNames", ()),
                    )
                    for name in names:
                        found.setdefault(name, kind)
        return found


def _pem(data: str) -> bytes:
    return base64.b64decode(data)
