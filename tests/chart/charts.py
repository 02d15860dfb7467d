"""The chart, rendered by Helm 4's library (package helm-python-sdk), and by the program `helm`.

The library is a wheel, so every machine tests the chart; the program is what users have, so it does
the same wherever it is installed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "keepstep"
RELEASE, NAMESPACE = "keepstep", "keepstep-system"
KUBERNETES = ("1.29", "1.34")
"""The oldest version that the chart supports, and the one that the end-to-end tests run on."""

Object = dict[str, Any]

_INFO = 1
"""Of lint's severities: 2 is a warning, 3 an error."""


class Refused(Exception):
    """Helm would not lint or render: its words."""


class Helm(Protocol):
    """What the tests need of Helm."""

    def template(self, values: Object, *, release: str, namespace: str) -> str:
        """The manifests, hooks included. Raises Refused."""
        ...

    def lint(self, values: Object) -> None:
        """Raises Refused on any error or warning."""
        ...


class Library:
    """Helm 4, in this process."""

    def template(self, values: Object, *, release: str, namespace: str) -> str:
        try:
            with helm_python.Chart.load(CHART) as chart:
                chart.validate_schema(values)
                rendered = chart.render(values, name=release, namespace=namespace)
        except helm_python.HelmError as error:
            raise Refused(str(error)) from error
        return "\n---\n".join(
            text for path, text in sorted(rendered.items()) if path.endswith(".yaml")
        )

    def lint(self, values: Object) -> None:
        report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)
        bad = [message for message in report["messages"] if message["severity"] > _INFO]
        if bad or report["errors"]:
            raise Refused(f"{bad} {report['errors']}")


class Program:
    """The `helm` on the PATH."""

    def __init__(self, scratch: Path) -> None:
        self._values = scratch / "values.yaml"

    def template(self, values: Object, *, release: str, namespace: str) -> str:
        where = ("-n", namespace, "--kube-version", KUBERNETES[-1])
        return self._run(values, "template", release, str(CHART), *where)

    def lint(self, values: Object) -> None:
        where = ("-n", NAMESPACE, "--kube-version", KUBERNETES[-1])
        self._run(values, "lint", "--strict", str(CHART), *where)

    def _run(self, values: Object, *arguments: str) -> str:
        self._values.write_text(yaml.safe_dump(values))
        done = subprocess.run(
            ["helm", *arguments, "-f", str(self._values)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise Refused(f"{done.stdout}{done.stderr}")
        return done.stdout


class Chart:
    """Renders the chart with values, each only once; parses what comes out."""

    def __init__(self, helm: Helm) -> None:
        self._helm = helm
        self._rendered: dict[str, list[Object]] = {}

    def render(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        release: str = RELEASE,
        namespace: str = NAMESPACE,
    ) -> list[Object]:
        """Every object, hooks included; not to be changed. Raises Refused."""
        key = json.dumps([values or {}, release, namespace])
        if key not in self._rendered:
            text = self._helm.template(dict(values or {}), release=release, namespace=namespace)
            self._rendered[key] = [
                document for document in yaml.load_all(text, yaml.CSafeLoader) if document
            ]
        return self._rendered[key]

    def lint(self, values: Mapping[str, Any] | None = None) -> None:
        """Raises Refused."""
        self._helm.lint(dict(values or {}))


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """Objects of a kind by name."""
    return {body["metadata"]["name"]: body for body in objects if body["kind"] == kind}


def is_hook(body: Object) -> bool:
    return "helm.sh/hook" in (body["metadata"].get("annotations") or {})


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """(name, pod spec) of everything that runs."""
    for body in objects:
        if body["kind"] in ("Deployment", "StatefulSet"):
            yield body["metadata"]["name"], body["spec"]["template"]["spec"]
        elif body["kind"] == "Pod":
            yield body["metadata"]["name"], body["spec"]


def crds() -> dict[str, Object]:
    """crds/ by kind."""
    loaded = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    return {crd["spec"]["names"]["kind"]: crd for crd in loaded}


def schema_of(crd: Object) -> Object:
    """The schema of its one version."""
    (version,) = crd["spec"]["versions"]
    schema: Object = version["schema"]["openAPIV3Schema"]
    return schema


def walk(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Every schema below one, with its path; the items of a list end in `[]`.

    Not the object's metadata: the API server knows its schema, and refuses any other.
    """
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        if path or name != "metadata":
            yield from walk(inner, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
