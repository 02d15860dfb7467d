"""The API server, as the user's kubeconfig reaches it: the official client, objects as JSON.

UsageError      no kubeconfig, no such context
Refused         the server's answer: not found, not allowed, not valid, changed meanwhile
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Final
from urllib.parse import quote

from kubernetes import config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from keepstep.errors import KeepstepError, UsageError
from keepstep_operator import names

Body = dict[str, Any]

_TIMEOUT_S: Final = 30.0
_MERGE: Final = "application/merge-patch+json"
_JSON_PATCH: Final = "application/json-patch+json"


class Refused(KeepstepError):
    """The API server refused a request. `code`: the HTTP status; 0 if it was not reached."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class Cluster:
    """One context of a kubeconfig. `namespace`: the given one, or the context's."""

    def __init__(self, *, context: str | None = None, namespace: str | None = None) -> None:
        # may name several files, as for kubectl; by itself the client reads the variable on import
        files = os.environ.get("KUBECONFIG") or None
        try:
            self._api = config.new_client_from_config(files, context=context)
            contexts, current = config.list_kube_config_contexts(files)
        except (config.ConfigException, OSError, TypeError) as error:
            said = f"no cluster to ask: {error}; see KUBECONFIG, and --context"
            raise UsageError(said) from error
        chosen = next((one for one in contexts if one["name"] == context), current)
        self.namespace: str = namespace or chosen["context"].get("namespace") or "default"

    # --- keepstep's own objects --------------------------------------------------------------

    def runs(self) -> list[Body]:
        """The namespace's CheckpointRuns, sorted by name. Raises Refused, as all methods below."""
        return self.list(self._path("checkpointruns"))

    def run(self, name: str) -> Body:
        """The CheckpointRun of this name."""
        return self._json("GET", self._path("checkpointruns", name))

    def checkpoints(self, run: str) -> list[Body]:
        """The Checkpoints of one run: its pinned and archived steps."""
        found = self.list(self._path("checkpoints"))
        return [one for one in found if one["spec"]["run"] == run]

    def ask_to_restore_from(self, run: str, step: str) -> None:
        """Write `spec.restoreFrom`, whatever its value is."""
        body = {"spec": {"restoreFrom": step}}
        self._json("PATCH", self._path("checkpointruns", run), body=body, kind=_MERGE)

    def annotate(self, run: str, annotations: dict[str, str]) -> None:
        """Write these annotations of the CheckpointRun, whatever their values are."""
        body = {"metadata": {"annotations": annotations}}
        self._json("PATCH", self._path("checkpointruns", run), body=body, kind=_MERGE)

    def replace_pins(self, run: Body, pins: list[str]) -> None:
        """Write `spec.pins`, if the spec is still that of `run`. The status does not matter, since
        the operator writes it all the time."""
        path = self._path("checkpointruns", run["metadata"]["name"])
        if "spec" not in run:  # a spec that was written meanwhile stays
            self._json("PATCH", path, body={"spec": {"pins": pins}}, kind=_MERGE)
            return
        operations: list[Body] = [
            {"op": "test", "path": "/spec", "value": run["spec"]},
            {"op": "add", "path": "/spec/pins", "value": pins},
        ]
        self._json("PATCH", path, body=operations, kind=_JSON_PATCH)

    def _path(self, plural: str, name: str = "") -> str:
        path = f"/apis/{names.API_VERSION}/namespaces/{_quoted(self.namespace)}/{plural}"
        return f"{path}/{_quoted(name)}" if name else path

    # --- what Kubernetes has of them ---------------------------------------------------------

    def pods(self, run: str, *, node_rank: int | None = None) -> list[Body]:
        """The run's pods with a sidecar; only those of `node_rank`, if it is given."""
        labels = f"{names.RUN_KEY_LABEL}={run},{names.INJECTED_LABEL}={names.INJECTED}"
        if node_rank is not None:
            labels += f",{names.NODE_RANK_LABEL}={node_rank}"
        return self.list(f"/api/v1/namespaces/{_quoted(self.namespace)}/pods", labels=labels)

    def log(self, pod: str, *, lines: int, previous: bool) -> str:
        """The last `lines` of the log of a pod's sidecar, or of its previous container."""
        query = {"container": names.SIDECAR_CONTAINER, "tailLines": str(lines)}
        query |= {"previous": "true"} if previous else {}
        path = f"/api/v1/namespaces/{_quoted(self.namespace)}/pods/{_quoted(pod)}/log"
        return self._call("GET", path, query=query)

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

    def served(self) -> set[str]:
        """The served kinds of keepstep's API, by plural."""
        said = self._json("GET", f"/apis/{names.API_VERSION}")
        return {str(one["name"]) for one in said["resources"]}

    def list(self, path: str, *, labels: str = "") -> list[Body]:
        """The objects of the collection at `path` with these labels, sorted by name."""
        query = {"labelSelector": labels} if labels else {}
        items: list[Body] = self._json("GET", path, query=query)["items"]
        return sorted(items, key=lambda one: str(one["metadata"]["name"]))

    def _json(self, method: str, path: str, **options: Any) -> Body:
        body: Body = json.loads(self._call(method, path, **options))
        return body

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Any = None,
        kind: str = "",
    ) -> str:
        headers = {"Accept": "application/json", **({"Content-Type": kind} if kind else {})}
        asked = self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            said = self._api.call_api(*asked, _request_timeout=_TIMEOUT_S)
            text = str(said.read().decode(errors="replace"))
        except (ApiException, HTTPError, OSError) as error:
            raise Refused(f"the API server does not answer: {error}", code=0) from error
        if said.status >= 400:
            raise Refused(_words(path, said.status, text), code=said.status)
        return text


def _not_forwarded(error: ApiException, place: str) -> Refused:
    """Why a port of the pod `place` cannot be reached, and what to do."""
    cause = error.__context__
    code = int(getattr(cause, "status_code", 0) or 0)
    hint = "; the rights are get and create of pods/portforward in the namespace"
    body = getattr(cause, "resp_body", None) or b""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    try:
        said = str(json.loads(text)["message"])
    except (ValueError, TypeError, KeyError):
        said = f"the API server said {code}" if code else str(error.reason)
    return Refused(
        f"no way to the page in pod {place}: {said}{hint if code == 403 else ''}", code=code
    )


def _words(path: str, code: int, text: str) -> str:
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, TypeError, KeyError):
        message = text[:200] or f"HTTP {code}"
    # a failed `test` of a JSON patch; the server says no more than this
    if code == 422 and "is invalid" not in message:
        return (
            f"somebody changed the run's spec meanwhile; look at it, and say it again ({message})"
        )
    return f"{path}: {message}" if code in (401, 403) else message


def _quoted(name: str) -> str:
    """One part of a path, whatever the user typed: a name never leads to another object."""
    return quote(name, safe="")
