"""`helm test`: create an annotated pod as a dry run, and look at what admission made of it.

Runs in the operator's image with the standard library only. Asks again until the deadline, as right
after an install the certificate may be a few seconds old, and then says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SIDECAR = "keepstep-sidecar"
_SOCKET = "KEEPSTEP_SOCKET"
_PAUSE_S = 2.0


@dataclass(frozen=True)
class Answer:
    """What the API server said: the pod as it would be, and every `Warning` header."""

    pod: dict[str, Any]
    warnings: tuple[str, ...] = ()


def annotated_pod(policy: str) -> dict[str, Any]:
    """A training pod that satisfies Pod Security "restricted" by itself."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "helm-test", "annotations": {"keepstep.dev/policy": policy}},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "trainer",
                    "image": "keepstep/helm-test:never-pulled",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "runAsNonRoot": True,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }


def problems(pod: dict[str, Any]) -> list[str]:
    """What of an injection is not there; empty when all is well."""
    found = []
    labels = pod["metadata"].get("labels", {})
    if labels.get("keepstep.dev/injected") != "true":
        found.append('the pod lacks the label keepstep.dev/injected="true"')
    first: dict[str, Any] = next(iter(pod["spec"].get("initContainers", ())), {})
    if first.get("name") != _SIDECAR or first.get("restartPolicy") != "Always":
        found.append(f"the first init container is not {_SIDECAR} with restartPolicy Always")
    (trainer,) = (one for one in pod["spec"]["containers"] if one["name"] == "trainer")
    if _SOCKET not in {one["name"] for one in trainer.get("env", ())}:
        found.append(f"the training container lacks the variable {_SOCKET}")
    return found


def create(server: str, namespace: str, pod: dict[str, Any], *, account: Path) -> Answer:
    """POST the pod with dryRun=All. Raises OSError, with the server's words where there are any."""
    request = urllib.request.Request(
        f"{server}/api/v1/namespaces/{namespace}/pods?dryRun=All",
        data=json.dumps(pod).encode(),
        headers={
            "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=15, context=trust) as reply:
            return Answer(json.load(reply), tuple(reply.headers.get_all("Warning") or ()))
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"HTTP {error.code}: {_message(error.read())}") from error


def check(server: str, namespace: str, policy: str, *, account: Path, within_s: float) -> list[str]:
    """Ask until the pod is injected, or time is up. What is wrong at the end; empty: nothing."""
    deadline = time.monotonic() + within_s
    while True:
        found = _attempt(server, namespace, policy, account)
        if not found or time.monotonic() + _PAUSE_S > deadline:
            return found
        time.sleep(_PAUSE_S)


def _attempt(server: str, namespace: str, policy: str, account: Path) -> list[str]:
    try:
        answer = create(server, namespace, annotated_pod(policy), account=account)
    except OSError as error:
        return [f"the API server refuses the pod: {error}"]
    missing = problems(answer.pod)
    return [*missing, *(f"admission warns: {one}" for one in answer.warnings)] if missing else []


def _message(body: bytes) -> str:
    """`message` of a Status, or the body as it is."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:1000]


def _server() -> str:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def main() -> int:
    """0 when the pod came back injected."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--within", type=float, default=90.0, help="Seconds.")
    given = parser.parse_args()
    found = check(_server(), given.namespace, given.policy, account=_ACCOUNT, within_s=given.within)
    if not found:
        print("an annotated pod gets its sidecar")
        return 0
    print("an annotated pod is not injected:", *found, sep="\n  ", file=sys.stderr)
    print(
        "look at the logs of the Deployments keepstep-admission and keepstep-certificates, and at"
        " `kubectl get mutatingwebhookconfigurations keepstep -o yaml` (caBundle)",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
