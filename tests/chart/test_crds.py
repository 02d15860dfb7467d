"""crds/: what the API server must accept, and what a reader of `kubectl explain` must find."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from keepstep.wire import run_reports
from keepstep_operator.api import run_status
from keepstep_operator.api.run_status import RunStatus
from tests.chart.charts import ROOT, Object, crds, schema_of, walk
from tests.chart.schemas import closed, filled, json_schema

CRDS = crds()
KINDS = sorted(CRDS)
FIELDS = [
    (f"{kind}{path}", schema) for kind in KINDS for path, schema in walk(schema_of(CRDS[kind]))
]


def test_every_string_list_and_map_is_bounded() -> None:
    many = {f"CheckpointRun.status.{name}": 1024 for name in ("holders", "drives")}  # of nodes
    assert [path for path, field in FIELDS if not _bounded(field, most=many.get(path, 64))] == []


def test_every_schema_has_one_type() -> None:
    for path, field in FIELDS:
        assert ("type" in field) != ("x-kubernetes-int-or-string" in field), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_crd_has_a_status_short_names_and_columns_and_is_kept_on_uninstall(kind: str) -> None:
    crd = CRDS[kind]
    (version,) = crd["spec"]["versions"]
    assert version["name"] == "v1alpha1"
    assert version["subresources"] == {"status": {}}
    assert crd["spec"]["names"]["categories"] == ["keepstep"]
    assert crd["spec"]["names"]["shortNames"]
    assert crd["metadata"]["name"] == f"{crd['spec']['names']['plural']}.keepstep.dev"
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert schema_of(crd)["properties"]["metadata"] == {"type": "object"}, "else it is refused"
    assert all(_resolves(schema_of(crd), column["jsonPath"]) for column in _columns(kind))


@pytest.mark.parametrize("path", sorted((ROOT / "examples/kubernetes").glob("policy*.yaml")))
def test_the_example_policies_fit_the_schema(path: Path) -> None:
    body = yaml.safe_load(path.read_text())
    schema = schema_of(CRDS["CheckpointPolicy"])
    jsonschema.validate(filled(body, schema), closed(json_schema(schema)))


def test_every_field_that_the_reconciler_writes_is_in_the_schema() -> None:
    """One that is not would be dropped by the API server, without a word."""
    schema = schema_of(CRDS["CheckpointRun"])["properties"]["status"]
    known = {path for path, _ in walk(schema)}
    assert set(_written(msgspec.json.schema(RunStatus))) <= known


def test_the_truncation_limits_of_the_reconciler_fit_the_schema() -> None:
    status = schema_of(CRDS["CheckpointRun"])["properties"]["status"]["properties"]
    assert status["recent"]["maxItems"] >= run_reports.MOST_RECENT
    assert status["ranks"]["maxItems"] >= run_reports.MOST_NODES
    assert status["holders"]["maxItems"] >= run_reports.MOST_HOLDERS
    assert status["drives"]["maxItems"] >= run_reports.MOST_DRIVES
    assert status["warnings"]["maxItems"] >= run_status.MOST_WARNINGS
    for text in (
        status["warnings"]["items"],
        status["recent"]["items"]["properties"]["message"],
        status["conditions"]["items"]["properties"]["message"],
        status["pinned"],
    ):
        assert text["maxLength"] >= run_status.LONGEST_TEXT


def _bounded(schema: Object, *, most: int) -> bool:
    if schema.get("type") == "array":
        return bool(schema["maxItems"] <= most)
    if schema.get("type") == "string" or "x-kubernetes-int-or-string" in schema:
        limited = "maxLength" in schema or "enum" in schema
        return limited or schema.get("format") == "date-time"
    return "additionalProperties" not in schema or bool(schema["maxProperties"] <= most)


def _columns(kind: str) -> list[Object]:
    columns: list[Object] = CRDS[kind]["spec"]["versions"][0]["additionalPrinterColumns"]
    return columns


def _resolves(schema: Object, path: str) -> bool:
    """Whether a column's simple jsonPath leads to a field of the schema."""
    if path == ".metadata.creationTimestamp":
        return True
    for name in re.sub(r"\[[^]]*\]", "[]", path).lstrip(".").split("."):
        schema = schema["properties"].get(name.removesuffix("[]"), {})
        schema = schema.get("items", {}) if name.endswith("[]") else schema
    return bool(schema)


def _written(schema: Object) -> Iterator[str]:
    """Paths of msgspec's JSON schema, in the notation and with the names of `walk`."""

    def below(part: Object, path: str) -> Iterator[str]:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        for choice in part.get("anyOf", ()):
            yield from below(choice, path)
        for name, inner in part.get("properties", {}).items():
            first, *more = name.split("_")
            camel = first + "".join(map(str.capitalize, more))
            yield f"{path}.{camel}"
            yield from below(inner, f"{path}.{camel}")
        if isinstance(part.get("items"), dict):
            yield from below(part["items"], f"{path}[]")

    yield from below(schema, "")
