"""How to reach the API server, and as whom: a service account, or what KUBECONFIG names."""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from keepstep.errors import UsageError
from keepstep_operator.bodies import Body

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


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
