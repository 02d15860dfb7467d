"""How to reach the API server, and with which identity: a service account, or KUBECONFIG's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from keepstep.errors import UsageError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, kw_only=True)
class Access:
    """The official client's configuration, and the namespace of the service account or context."""

    configuration: Any
    namespace: str = "default"


async def find_access() -> Access:
    """KUBECONFIG if it is set, otherwise the pod's service account. Raises UsageError."""
    if path := os.environ.get("KUBECONFIG"):
        return await from_kubeconfig(Path(path))
    return in_cluster()


def in_cluster(directory: Path = SERVICE_ACCOUNT) -> Access:
    """The pod's service account. Its token is read again each minute, because the kubelet rotates
    it. Raises UsageError outside a cluster."""
    configuration = Configuration()
    loader = InClusterConfigLoader(str(directory / "token"), str(directory / "ca.crt"))
    try:
        loader.load_and_set(configuration)
        namespace = (directory / "namespace").read_text().strip()
    except (ConfigException, OSError) as error:
        raise UsageError(
            "no Kubernetes API here: neither KUBECONFIG is set, nor a service account is mounted"
            f" ({error})"
        ) from error
    return Access(configuration=configuration, namespace=namespace)


async def from_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig. Raises UsageError."""
    configuration = Configuration()
    try:
        loader = await load_kube_config(
            str(path), client_configuration=configuration, persist_config=False
        )
        context = loader.current_context["context"]
        if configuration.host == Configuration().host:
            raise ConfigException("its cluster names no server")
    # errors in the file come as any of these
    except (ConfigException, OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"kubeconfig {path}: {type(error).__name__}: {error}") from error
    return Access(configuration=configuration, namespace=context.get("namespace") or "default")
