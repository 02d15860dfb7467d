"""kubectl, as a function: what a user types is what the tests run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness import eventually

Object = dict[str, Any]


class Kubectl:
    """`kubectl` with a kubeconfig; `namespaced` gives one for a namespace."""

    def __init__(self, kubeconfig: Path, namespace: str = "") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace

    def namespaced(self, namespace: str) -> Kubectl:
        return Kubectl(self.kubeconfig, namespace)

    def __call__(self, *arguments: str, input: str | None = None, timeout_s: float = 60.0) -> str:
        """Standard output. Raises RuntimeError with what it said."""
        done = self.attempt(*arguments, input=input, timeout_s=timeout_s)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def attempt(
        self, *arguments: str, input: str | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """The finished process, whatever came of it."""
        where = ("-n", self.namespace) if self.namespace else ()
        return subprocess.run(
            ["kubectl", "--kubeconfig", str(self.kubeconfig), *where, *arguments],
            input=input,
            text=True,
            capture_output=True,
            timeout=timeout_s,
        )

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        self(
            "apply",
            "-f",
            "-",
            input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
        )

    def get(self, kind: str, name: str) -> Object | None:
        """One object, or None."""
        done = self.attempt("get", kind, name, "-o", "json", "--ignore-not-found")
        if done.returncode:
            raise RuntimeError(f"kubectl get {kind} {name}: {done.stderr.strip()[-1000:]}")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def list(self, kind: str, *selector: str) -> list[Object]:
        """Objects of a kind, those with these labels."""
        chosen = ("-l", ",".join(selector)) if selector else ()
        items: list[Object] = json.loads(self("get", kind, *chosen, "-o", "json"))["items"]
        return items

    def events(self, reason: str) -> list[Object]:
        """Events of the namespace with this reason, oldest first."""
        found = [one for one in self.list("events") if one.get("reason") == reason]
        return sorted(found, key=lambda one: str(one["metadata"]["creationTimestamp"]))

    def eventually(
        self, look: Callable[[], Any], *, within_s: float = 120.0, what: str = ""
    ) -> Any:
        """The first true answer of `look`, which may fail while the API server is away."""

        def answer() -> Any:
            try:
                return look()
            except (RuntimeError, subprocess.TimeoutExpired, KeyError, IndexError):
                return None

        return eventually(answer, within_s=within_s, what=what, every_s=0.5)
