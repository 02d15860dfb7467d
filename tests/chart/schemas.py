"""What the API server does with a schema, as far as the tests need it: defaults, validation."""

from __future__ import annotations

from typing import Any

from tests.chart.charts import Object


def filled(value: Any, schema: Object) -> Any:
    """The value with defaults filled in."""
    if isinstance(value, list):
        return [filled(item, schema["items"]) for item in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    given = {name: inner["default"] for name, inner in known.items() if "default" in inner} | value
    return {
        name: filled(value, known[name]) if name in known else value
        for name, value in given.items()
    }


def json_schema(schema: Object) -> Object:
    """OpenAPI as JSON schema: the CRDs use nothing that differs, but for `format`."""
    return {name: value for name, value in schema.items() if name not in ("format", "default")}


def closed(schema: Object) -> Object:
    """Refuses unknown fields, as `kubectl apply` does."""
    if schema.get("type") == "object" and "properties" in schema:
        inner = {name: closed(inner) for name, inner in schema["properties"].items()}
        return {**schema, "properties": inner, "additionalProperties": False}
    if "items" in schema:
        return {**schema, "items": closed(schema["items"])}
    return schema
