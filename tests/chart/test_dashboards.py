"""The dashboard asks for metrics and labels that the processes have, in PromQL that parses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from keepstep_operator.admission.metrics import Metrics as AdmissionMetrics
from keepstep_operator.certificates.main import Metrics as CertificateMetrics
from keepstep_operator.reconcile.metrics import CONDITION, RUNS
from keepstep_operator.reconcile.metrics import Metrics as ReconcileMetrics
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_sidecar.api.metrics import TABLE
from tests.chart.charts import CHART, Chart, Object, of_kind

DASHBOARD = json.loads((CHART / "files" / "dashboards" / "keepstep.json").read_text())
FILLED_IN = {"$__rate_interval": "5m", "$__range": "6h"}
"""What Grafana writes there before Prometheus sees it."""

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_OF_A_POD = {"namespace", "pod"}
"""Labels that the Prometheus operator gives to whatever it scrapes by a PodMonitor."""


def _queries() -> dict[str, str]:
    """Every query, by its panel's title and letter."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in FILLED_IN.items():
                query = query.replace(name, value)
            found[f"{panel['title']} {panel['id']}{target['refId']}"] = query
    return found


QUERIES = _queries()


@pytest.fixture
def labels_of(chart: Chart) -> dict[str, set[str]]:
    """Labels of every time series that Prometheus has of ours, by name."""
    monitors = of_kind(chart.render({"podMonitor": {"enabled": True}}), "PodMonitor")
    (endpoint,) = monitors["keepstep-sidecars"]["spec"]["podMetricsEndpoints"]
    given = _OF_A_POD | {one["targetLabel"] for one in endpoint["relabelings"]}
    found: dict[str, set[str]] = {}
    for row in TABLE:
        _add(found, row.name, row.kind, {*row.labels, *given})
    for run in RUNS:
        kind = "counter" if "Counter" in run.family.__name__ else "gauge"
        _add(found, run.name, kind, {"namespace", "run"})
    _add(found, CONDITION[0], "gauge", {"namespace", "run", "condition", "status"})
    for registry in (
        ReconcileMetrics(Registry()).registry,
        AdmissionMetrics().registry,
        CertificateMetrics().registry,
    ):
        # the labels of a metric that has counted nothing yet stand in the collector alone
        for one in registry._collector_to_names:
            if names := getattr(one, "_labelnames", None):
                _add(found, one._name, one._type, set(names))
        for family in registry.collect():
            if family.name not in {name.removesuffix("_total") for name in found}:
                _add(found, family.name, family.type, set())
    return found


def _add(found: dict[str, set[str]], name: str, kind: str, labels: set[str]) -> None:
    extra = {"le"} if kind == "histogram" else set()
    for suffix in _SUFFIXES[kind]:
        found[name + suffix] = labels | extra


def _nodes(query: str) -> list[Any]:
    nodes: list[Any] = []
    promql_parser.walk(promql_parser.parse(query), pre_visit=nodes.append)
    return nodes


def _selectors(query: str) -> Iterator[Any]:
    for node in _nodes(query):
        if isinstance(node, promql_parser.MatrixSelector):
            yield node.vector_selector
        elif isinstance(node, promql_parser.VectorSelector):
            yield node


def _grouped(query: str) -> set[str]:
    """Labels of every by (...) and on (...)."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", query))))


@pytest.mark.parametrize("where", sorted(QUERIES))
def test_every_query_parses_and_asks_for_what_there_is(
    where: str, labels_of: dict[str, set[str]]
) -> None:
    query = QUERIES[where]
    names = [one.name for one in _selectors(query)]
    assert names
    assert set(names) <= labels_of.keys()
    for one in _selectors(query):
        asked = {matcher.name for matcher in one.matchers.matchers}
        assert asked <= labels_of[one.name], one.name
    known = set.union(*(labels_of[name] for name in names))
    assert _grouped(query) <= known


def test_legends_and_variables_name_labels_that_the_queries_keep(
    labels_of: dict[str, set[str]],
) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            by = re.search(r"\bby \(([^)]*)\)", target["expr"])
            (name, *_) = (one.name for one in _selectors(QUERIES[_key(panel, target)]))
            kept = set(re.findall(r"\w+", by[1])) if by else labels_of[name]
            assert shown <= kept, panel["title"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variable["definition"])
            assert asked is not None
            assert asked[2] in labels_of[asked[1]]


def _key(panel: Object, target: Object) -> str:
    return f"{panel['title']} {panel['id']}{target['refId']}"


def test_panels_do_not_lie_on_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_is_off_and_when_asked_for_reaches_grafana_as_it_is(
    chart: Chart, plain: list[Object]
) -> None:
    assert "keepstep-dashboards" not in of_kind(plain, "ConfigMap")
    values = {"grafanaDashboard": {"enabled": True, "labels": {"team": "ml"}}}
    made = of_kind(chart.render(values), "ConfigMap")["keepstep-dashboards"]
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert made["metadata"]["labels"]["team"] == "ml"
    assert json.loads(made["data"]["keepstep.json"]) == DASHBOARD
