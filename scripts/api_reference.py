"""The tables of docs/api.md, from crds/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
_ORDER = ("CheckpointPolicy", "CheckpointRun", "Checkpoint")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One line of a table. `path` starts below `spec` or `status`; `[]` stands for the items of a
    list, and a final `*` for a required field."""

    path: str
    type: str
    limits: str
    default: str
    description: str


def crds() -> list[dict[str, Any]]:
    """Every CustomResourceDefinition of crds/, in the order of the reference."""
    loaded = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    return sorted(loaded, key=lambda crd: _ORDER.index(crd["spec"]["names"]["kind"]))


def reference() -> str:
    """A section for each kind, in Markdown."""
    return "\n".join(_kind(crd) for crd in crds())


def _kind(crd: dict[str, Any]) -> str:
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    shorts = ", ".join(f"`{short}`" for short in names["shortNames"])
    parts = [
        f"## {names['kind']}\n",
        f"{schema['description']}\n",
        f"`kubectl get {names['plural']}`, short {shorts}, category `{names['categories'][0]}`.",
        f"Columns: {_columns(version['additionalPrinterColumns'])}.\n",
        *(_table(name, schema) for name in ("spec", "status") if name in schema["properties"]),
    ]
    return "\n".join(parts)


def _columns(columns: list[dict[str, Any]]) -> str:
    return ", ".join(
        column["name"].upper() + (" (`-o wide`)" if column.get("priority") else "")
        for column in columns
    )


def _table(name: str, schema: dict[str, Any]) -> str:
    part = schema["properties"][name]
    rows = ["| field | type | limits | default | |", "| --- | --- | --- | --- | --- |"]
    rows += [_row(field) for field in fields(part, "")]
    rules = [f"- {rule['message']}" for rule in _rules(part)]
    lines = ["\nRules:\n", *dict.fromkeys(rules)] if rules else []
    return "\n".join([f"### {name}\n", f"{part['description']}\n", *rows, *lines, ""])


def _row(field: Field) -> str:
    cells = (f"`{field.path}`", field.type, field.limits, field.default, field.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def fields(schema: dict[str, Any], prefix: str) -> Iterator[Field]:
    """Every field below a schema. A field comes before the fields inside it."""
    required = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        yield Field(
            path=path + ("*" if name in required else ""),
            type=_type(inner),
            limits=_limits(inner),
            default=f"`{_short(inner['default'])}`" if "default" in inner else "",
            description=inner["description"],
        )
        yield from fields(inner, f"{path}.")
        yield from fields(inner.get("items", {}), f"{path}[].")


def _type(schema: dict[str, Any]) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("format") == "date-time":
        return "time"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    return str(schema["type"])


def _limits(schema: dict[str, Any]) -> str:
    """The limits of a field, in words."""
    inner = schema.get("items", {})
    limits = []
    if choices := schema.get("enum") or inner.get("enum"):
        limits.append(", ".join(f"`{choice}`" for choice in choices))
    if "minimum" in schema and "maximum" in schema:
        limits.append(f"{schema['minimum']} to {schema['maximum']}")
    elif "minimum" in schema:
        limits.append(f"at least {schema['minimum']}")
    if "maxItems" in schema:
        limits.append(f"{schema.get('minItems', 0)} to {schema['maxItems']} items")
    if keys := schema.get("x-kubernetes-list-map-keys"):
        limits.append(f"unique by {keys[0]}")
    if schema.get("x-kubernetes-list-type") == "set":
        limits.append("unique")
    return "; ".join(limits)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _rules(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from schema.get("x-kubernetes-validations", ())
    for inner in schema.get("properties", {}).values():
        yield from _rules(inner)
    if "items" in schema:
        yield from _rules(schema["items"])
