"""values.yaml and values.schema.json: what is there is documented, what is not is refused."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from tests.chart.charts import CHART, Chart, Object, Refused

SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())
VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hostPath": ["/mnt"]}, "hostPath"),
        ({"admission": {"replica": 3}}, "replica"),
        ({"admission": {"failurePolicy": "ignore"}}, "failurePolicy"),
        ({"images": {"sidecar": {"version": "1"}}}, "version"),
        ({"certificates": {"replicas": 2}}, "replicas"),
        ({"prometheusRule": {"enable": True}}, "enable"),
        ({"crds": {"install": "yes"}}, "install"),
        ({"fullnameOverride": "123"}, "123"),
        ({"nameOverride": "123"}, "123"),
    ],
)
def test_a_typo_is_refused_by_name(chart: Chart, values: Object, message: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=message):
        jsonschema.validate(_over(VALUES, values), SCHEMA)
    with pytest.raises(Refused, match=message):
        chart.render(values)


@pytest.mark.parametrize(
    "path", ["/", "//", "mnt", "/mnt/../etc", "/mnt/..", "/./mnt", "/mnt//nvme", ""]
)
def test_a_host_path_must_be_an_absolute_plain_directory(path: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(_over(VALUES, {"hostPaths": [path]}), SCHEMA)


def _over(values: Object, changes: Object) -> Object:
    merged = dict(values)
    for name, change in changes.items():
        old = merged.get(name)
        merged[name] = (
            _over(old, change) if isinstance(old, dict) and isinstance(change, dict) else change
        )
    return merged
