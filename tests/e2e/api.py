"""What tests look at, asked of the API server without a process: kubectl takes a tenth of a second
of a core, and tests look twice a second. What tests do is done by kubectl, as users do it."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_TIMEOUT_S = 30.0
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
        self._server = str(cluster["cluster"]["server"])
        context = ssl.create_default_context(
            cadata=_pem(cluster["cluster"]["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as file:
            for part in ("client-certificate-data", "client-key-data"):
                file.write(_pem(user["user"][part]))
            file.flush()
            context.load_cert_chain(file.name)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def get(self, path: str, *, accept: str = "application/json", **query: str) -> str | None:
        """The answer, None where nothing is there. Raises RuntimeError for any other."""
        asked = f"?{urllib.parse.urlencode(query)}" if query else ""
        request = urllib.request.Request(f"{self._server}{path}{asked}", headers={"Accept": accept})
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return str(answer.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()[-1000:]}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"{path}: {error}") from error

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
                for one in version["resources"]:
                    kind = Kind(
                        root=f"{within}/{version['version']}",
                        resource=one["resource"],
                        namespaced=one["scope"] == "Namespaced",
                    )
                    names = (one["resource"], one["singularResource"], *one.get("shortNames", ()))
                    for name in names:
                        found.setdefault(name, kind)
        return found


def _pem(data: str) -> bytes:
    return base64.b64decode(data)
