"""How to reach the API server, and with which identity: a service account, or KUBECONFIG's."""

from __future__ import annotations

import os

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from keepstep.errors import UsageError


async def find_access() -> Configuration:
    """The context that KUBECONFIG names if it is set, otherwise the pod's service account, whose
    token is read again each minute. Raises UsageError."""
    configuration = Configuration()
    path = os.environ.get("KUBECONFIG")
    try:
        if not path:
            load_incluster_config(client_configuration=configuration)
            return configuration
        await load_kube_config(path, client_configuration=configuration, persist_config=False)
        if configuration.host == Configuration().host:
            raise ConfigException("its cluster names no server")
    # errors in the file come as any of these
    except (ConfigException, OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        where = f"kubeconfig {path}" if path else "no KUBECONFIG, and no service account is mounted"
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from error
    return configuration
