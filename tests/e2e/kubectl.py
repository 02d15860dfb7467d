"""kubectl, as a function: what a user types is what the tests run."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.api import Api
from tests.harness import eventually

Object = dict[str, Any]

PATIENCE = 3.0
"""Tests run beside others, on machines that may be half as fast."""


@functools.cache
def _api(kubeconfig: Path) -> Api:
    return Api(kubeconfig)


class Kubectl:
    """`kubectl` with a kubeconfig; `namespaced` gives one for a namespace."""

    def __init__(self, kubeconfig: Path, namespace: str = "") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace

    def namespaced(self, namespace: str) -> Kubectl:
        return Kubectl(self.kubeconfig, namespace)

    @property
    def _api(self) -> Api:
        return _api(self.kubeconfig)

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
        output = self._api.get(f"{self._api.path(kind, self.namespace)}/{name}")
        return json.loads(output) if output else None

    def list(self, kind: str, *selector: str) -> list[Object]:
        """Objects of a kind, those with these labels."""
        query = {"labelSelector": ",".join(selector)} if selector else {}
        output = self._api.get(self._api.path(kind, self.namespace), **query)
        items: list[Object] = json.loads(output or "{}").get("items", [])
        return items

    def logs(self, pod: str, container: str, *, previous: bool = False) -> str:
        """What a container of a pod wrote, in its present life or the one before. Raises
        RuntimeError where there is none."""
        path = f"{self._api.path('pods', self.namespace)}/{pod}/log"
        before = {"previous": "true"} if previous else {}
        output = self._api.get(path, container=container, **before)
        if output is None:
            raise RuntimeError(f"no logs of {container} of pod {pod}")
        return output

    def events(self, reason: str) -> list[Object]:
        """Events of the namespace with this reason, oldest first."""
        found = [event for event in self.list("events") if event.get("reason") == reason]
        return sorted(found, key=lambda event: str(event["metadata"]["creationTimestamp"]))

    @contextmanager
    def watching(self, kind: str, name: str) -> Iterator[list[str]]:
        """The versions that an object has: now, and on every change. All are there at the end."""
        versions: list[str] = []
        process = subprocess.Popen(
            ["kubectl", "--kubeconfig", str(self.kubeconfig), "-n", self.namespace, "get", kind,
             name, "--watch", "-o", 'jsonpath={.metadata.resourceVersion}{"\\n"}'],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield versions
        finally:
            process.terminate()
            output, _ = process.communicate(timeout=30)
            versions += output.split()

    def eventually(
        self,
        probe: Callable[[], Any],
        *,
        within_s: float = 120.0,
        what: str | Callable[[], str] = "",
    ) -> Any:
        """The first true answer of `probe`, which may fail while the API server is away. In
        `within_s` where nothing else runs, in `PATIENCE` times that anywhere."""

        def answer() -> Any:
            try:
                return probe()
            except (RuntimeError, subprocess.TimeoutExpired, KeyError, IndexError):
                return None

        return eventually(answer, within_s=PATIENCE * within_s, what=what, every_s=0.5)
