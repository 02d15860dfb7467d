"""The rules of the schemas, evaluated here: CEL by cel-python, quantities by our own parser.

The API server has the last word (a cluster checks `policies.py`, too); this finds a wrong rule
without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import celpy
import celpy.adapter
import jsonschema
import pytest
from celpy import celtypes

from keepstep_operator.api.quantities import parse_millicores
from tests.chart.charts import Object, crds, schema_of, walk
from tests.chart.policies import REFUSED, TAKEN, Case
from tests.chart.schemas import filled, json_schema

POLICY = schema_of(crds()["CheckpointPolicy"])["properties"]["spec"]
RUN = schema_of(crds()["CheckpointRun"])["properties"]["spec"]
ENVIRONMENT = celpy.Environment()


def _quantity(text: Any) -> celtypes.IntType:
    """In thousandths, so that `100m` is a whole number, too."""
    return celtypes.IntType(parse_millicores(str(text)))


def _compare(one: celtypes.IntType, other: celtypes.IntType) -> celtypes.IntType:
    return celtypes.IntType((one > other) - (one < other))


FUNCTIONS: dict[str, Any] = {"quantity": _quantity, "compareTo": _compare}


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_a_policy_that_makes_sense_is_taken(case: Case) -> None:
    assert list(problems(case.spec, POLICY)) == []


@pytest.mark.parametrize(
    "case", [one for one in REFUSED if one.name != "same names"], ids=lambda case: case.name
)
def test_a_policy_that_cannot_work_is_refused(case: Case) -> None:
    found = list(problems(case.spec, POLICY))
    assert found
    if any(case.told in message for message in _messages(POLICY)):
        assert any(case.told in one for one in found), found


@pytest.mark.parametrize("text", ["1200", "gpt-1a2b/1200", "0003.1f9c2d7a-000001200", "a/1"])
def test_a_step_to_restore_from_is_a_number_or_an_id_of_any_run(text: str) -> None:
    assert list(problems({"restoreFrom": text}, RUN)) == []


@pytest.mark.parametrize("text", ["latest", "a/b/1", "/1", "Gpt/1", "0003.1f9c-1", "-1"])
def test_anything_else_to_restore_from_is_refused(text: str) -> None:
    (found,) = problems({"restoreFrom": text}, RUN)
    assert found.startswith("restoreFrom must be")


def problems(value: Any, schema: Object) -> Iterator[str]:
    """As the API server: defaults, then the schema, and only then the rules."""
    whole = filled(value, schema)
    try:
        jsonschema.validate(whole, json_schema(schema))
    except jsonschema.ValidationError as error:
        yield error.message
        return
    yield from _broken_rules(whole, schema)


def _broken_rules(value: Any, schema: Object) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        program = ENVIRONMENT.program(ENVIRONMENT.compile(rule["rule"]), functions=FUNCTIONS)
        if not program.evaluate({"self": celpy.adapter.json_to_cel(value)}):
            yield rule["message"]
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from _broken_rules(value[name], inner)
    for one in value if isinstance(value, list) else ():
        yield from _broken_rules(one, schema["items"])


def _messages(schema: Object) -> Iterator[str]:
    for _, inner in walk(schema):
        for rule in inner.get("x-kubernetes-validations", ()):
            yield rule["message"]
