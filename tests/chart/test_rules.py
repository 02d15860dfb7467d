"""The rules of the schemas, evaluated here: CEL by cel-python, quantities by our own parser.

The API server has the last word; this finds a wrong rule without one.
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
from tests.chart.charts import Object, crds, schema_of
from tests.chart.schemas import filled, json_schema
from tests.operator.injection.pods import policy_body
from tests.operator.injection.test_policy import WRONG

POLICY = schema_of(crds()["CheckpointPolicy"])["properties"]["spec"]
RUN = schema_of(crds()["CheckpointRun"])["properties"]["spec"]
ENVIRONMENT = celpy.Environment()
RIGHT: list[Object] = [
    {"memory": {"limit": 1 << 30, "slots": 2}},
    {"persist": {"mode": "Fixed", "every": 100}, "stage": {"every": 5}},
    {"persist": {"mode": "Fixed", "every": 7}, "stage": {"mode": "Auto"}},
    {"persist": {"driveWritesPerDay": "0.5"}},
    {
        "volumes": [
            {"name": "a", "hostPath": {"path": "/mnt/nvme0/keep..step"}, "capacity": "400Gi"},
            {"name": "b", "ephemeral": {"size": "200Gi", "storageClassName": "local"}},
            {"name": "c", "emptyDir": {"sizeLimit": "100Gi"}},
        ]
    },
    {"flushTimeout": "1m60s", "runTTL": "8760h"},
    {"sidecar": {"resources": {"cpu": 2, "cpuLimit": "2000m", "memory": "1Gi"}}},
    {"sidecar": {"resources": {"cpuLimit": 1}, "bytesPerSecondLimit": "1e9"}},
    {"sidecar": {"ports": {"metrics": 9464, "peer": 65535}}},
    {"sidecar": {"ports": {"peer": 26742}}},
    {"peers": {}},
    {"peers": {"replicas": 2, "topologyKey": "topology.kubernetes.io/zone"}},
    {
        "retention": {"archive": {"last": 3, "every": "6h"}},
        "archive": {
            "s3": {
                "bucket": "ckpt",
                "prefix": "a/b",
                "endpoint": "http://10.0.0.1:7070",
                "region": "eu-1",
                "credentialsSecretRef": {"name": "s3"},
            },
            "every": 100,
        },
    },
    {"archive": {"gcs": {"bucket": "ckpt", "credentialsSecretRef": {"name": "gcs"}}}},
    {"archive": {"azure": {"container": "ckpt", "account": "us"}}},
    {"archive": {"directory": {"claimName": "archive"}}},
    {"archive": {"directory": {"path": "/mnt/nfs/keepstep"}}},
    {
        "volumes": [{"name": "a", "hostPath": {"path": "/mnt/nfs/keep"}}],
        "archive": {"directory": {"path": "/mnt/nfs/keepstep"}},
    },
]


def _quantity(text: Any) -> celtypes.IntType:
    """In thousandths, so that `100m` is a whole number, too."""
    return celtypes.IntType(parse_millicores(str(text)))


def _compare(first: celtypes.IntType, other: celtypes.IntType) -> celtypes.IntType:
    return celtypes.IntType((first > other) - (first < other))


FUNCTIONS: dict[str, Any] = {"quantity": _quantity, "compareTo": _compare}


@pytest.mark.parametrize("change", RIGHT, ids=str)
def test_a_valid_policy_is_accepted(change: Object) -> None:
    assert list(problems(policy_body()["spec"] | change, POLICY)) == []


BEYOND_CEL = ("names must differ", "'a\\\\n'")
"""What a list's keys say, and what Python's `$` lets pass."""
ONLY_HERE: list[Object] = [
    {"sidecar": {"resources": {"memory": "1Mi"}}},
    {"sidecar": {"resources": {"cpu": "1m"}}},
    {"persist": {"every": 100}},
]
"""What the operator would take."""


@pytest.mark.parametrize(
    "change",
    [
        *ONLY_HERE,
        *(spec for spec, message in WRONG if not any(word in message for word in BEYOND_CEL)),
    ],
    ids=str,
)
def test_an_invalid_policy_is_refused(change: Object) -> None:
    assert list(problems(policy_body()["spec"] | change, POLICY))


@pytest.mark.parametrize("text", ["1200", "gpt-1a2b/1200", "0003.1f9c2d7a-000001200", "a/1"])
def test_restore_from_accepts_a_step_number_or_a_step_id_of_any_run(text: str) -> None:
    assert list(problems({"restoreFrom": text}, RUN)) == []


@pytest.mark.parametrize("text", ["latest", "a/b/1", "/1", "Gpt/1", "0003.1f9c-1", "-1"])
def test_restore_from_refuses_any_other_text(text: str) -> None:
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
    for item in value if isinstance(value, list) else ():
        yield from _broken_rules(item, schema["items"])
