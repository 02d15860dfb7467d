"""The API server, as the user's kubeconfig reaches it: the official client, objects as JSON.

UsageError      no kubeconfig, no such context
ApiRefusal      the server's answer: not found, not allowed
"""

from __future__ import annotations

import json
import os
import socket
from typing import Final
from urllib.parse import quote

from kubernetes import config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from keepstep.errors import KeepstepError, UsageError
from keepstep_operator import names
from keepstep_operator.object_body import Body

_TIMEOUT_S: Final = 30.0


class ApiRefusal(KeepstepError):
    """The API server refused a request, or was not reached."""


class Cluster:
    """One context of a kubeconfig. `namespace`: the given one, or the context's."""

    def __init__(self, *, context: str | None = None, namespace: str | None = None) -> None:
        # may name several files, as for kubectl; by itself the client reads the variable on import
        files = os.environ.get("KUBECONFIG") or None
        try:
            self._api = config.new_client_from_config(files, context=context)
            contexts, current = config.list_kube_config_contexts(files)
        except (config.ConfigException, OSError, TypeError) as error:
            message = f"no cluster to ask: {error}; see KUBECONFIG, and --context"
            raise UsageError(message) from error
        chosen = next((entry for entry in contexts if entry["name"] == context), current)
        self.namespace: str = namespace or chosen["context"].get("namespace") or "default"

    def require_run(self, name: str) -> None:
        """Raises ApiRefusal, as all methods below; so if there is no CheckpointRun of this name."""
        space = _quoted(self.namespace)
        path = f"/apis/{names.API_VERSION}/namespaces/{space}/checkpointruns/{_quoted(name)}"
        self._get(path, {})

    def find_leader_pods(self, run: str) -> list[Body]:
        """The run's pods of node rank 0 with a sidecar, sorted by name."""
        labels = (
            f"{names.RUN_KEY_LABEL}={run},{names.NODE_RANK_LABEL}=0"
            f",{names.INJECTED_LABEL}={names.INJECTED}"
        )
        path = f"/api/v1/namespaces/{_quoted(self.namespace)}/pods"
        items: list[Body] = self._get(path, {"labelSelector": labels})["items"]
        return sorted(items, key=lambda item: str(item["metadata"]["name"]))

    def open_port(self, pod: str, port: int) -> socket.socket:
        """A connection to a port of a pod's loopback, through the API server."""
        from kubernetes.stream.ws_client import portforward_call

        path = f"/api/v1/namespaces/{_quoted(self.namespace)}/pods/{_quoted(pod)}"
        method, url, headers, *_ = self._api.param_serialize(
            "GET",
            f"{path}/portforward",
            query_params=[("ports", str(port))],
            auth_settings=["BearerToken"],
        )
        try:
            forward = portforward_call(self._api.configuration, method, url, headers=headers)
        except ApiException as error:
            raise _not_forwarded(error, f"{self.namespace}/{pod}") from error
        # what the client has is no socket, but an object around one
        return socket.socket(fileno=forward.socket(port).detach())

    def _get(self, path: str, query: dict[str, str]) -> Body:
        asked = self._api.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*asked, _request_timeout=_TIMEOUT_S)
            text = str(response.read().decode(errors="replace"))
        except (ApiException, HTTPError, OSError) as error:
            raise ApiRefusal(f"the API server does not answer: {error}") from error
        if response.status >= 400:
            message = _message(text) or text[:200] or f"HTTP {response.status}"
            where = f"{path}: " if response.status in (401, 403) else ""
            raise ApiRefusal(f"{where}{message}")
        body: Body = json.loads(text)
        return body


def _not_forwarded(error: ApiException, place: str) -> ApiRefusal:
    """Why a port of the pod `place` cannot be reached, and what to do."""
    cause = error.__context__
    code = int(getattr(cause, "status_code", 0) or 0)
    answer = _message(getattr(cause, "resp_body", None) or b"")
    message = answer or (f"the API server answered {code}" if code else str(error.reason))
    hint = "; the rights are get and create of pods/portforward in the namespace"
    return ApiRefusal(f"no way to the page in pod {place}: {message}{hint if code == 403 else ''}")


def _message(answer: str | bytes) -> str:
    """What a Status of the API server says; '' if the answer is none."""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, TypeError, KeyError):
        return ""


def _quoted(name: str) -> str:
    """One part of a path, whatever the user typed: a name never leads to another object."""
    return quote(name, safe="")
