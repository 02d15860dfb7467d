"""The alerts speak of metrics that the processes have, and tell what to do."""

from __future__ import annotations

import re

import pytest

from keepstep_operator.certificates.main import Metrics as CertificatesMetrics
from keepstep_operator.reconcile.metrics import Metrics as ReconcileMetrics
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_sidecar.api.metrics import TABLE
from tests.chart.charts import ROOT, Chart, Object, of_kind


@pytest.fixture
def alerts(chart: Chart) -> dict[str, Object]:
    """By name."""
    objects = chart.render({"prometheusRule": {"enabled": True}})
    (group,) = of_kind(objects, "PrometheusRule")["keepstep"]["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_every_metric_of_an_alert_is_made_by_some_process(alerts: dict[str, Object]) -> None:
    made = {row.name for row in TABLE}
    for registry in (ReconcileMetrics(Registry()).registry, CertificatesMetrics().registry):
        made |= {family.name for family in registry.collect()}
    used = {name for rule in alerts.values() for name in re.findall(r"keepstep_\w+", rule["expr"])}
    assert used
    assert used <= made


def test_every_alert_has_a_section_of_the_runbooks_and_leads_there(
    alerts: dict[str, Object], chart: Chart
) -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == alerts.keys()
    for name, text in sections.items():
        assert re.findall(r"^\*\*(Means|Look at)\*\*", text, re.MULTILINE) == ["Means", "Look at"]
        assert "| do |" in text or "\n**Do**" in text, name
    values = {"prometheusRule": {"enabled": True, "runbooks": "https://wiki.example/keepstep"}}
    (group,) = of_kind(chart.render(values), "PrometheusRule")["keepstep"]["spec"]["groups"]
    for rule in group["rules"]:
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example/keepstep#{anchor}"


def test_every_alert_of_the_operations_guide_is_there(alerts: dict[str, Object]) -> None:
    assert alerts.keys() >= {
        "KeepstepRunNotProtected",
        "KeepstepRunUnknown",
        "KeepstepCommitsStalled",
        "KeepstepPodsNotInjected",
        "KeepstepVolumeFailed",
    }


def test_alerts_wait_are_rated_and_tell_what_to_do(alerts: dict[str, Object]) -> None:
    for rule in alerts.values():
        assert rule["for"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}


def test_what_prometheus_fills_in_reaches_it_as_it_is(alerts: dict[str, Object]) -> None:
    summary = alerts["KeepstepRunNotProtected"]["annotations"]["summary"]
    assert "{{ $labels.namespace }}/{{ $labels.run }}" in summary
