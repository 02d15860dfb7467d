"""The alerts speak of metrics that the processes have, and tell what to do."""

from __future__ import annotations

import json
import re

import pytest

from keepstep_operator.admission.metrics import AdmissionMetrics
from keepstep_operator.certificates.main import CertificatesMetrics
from keepstep_operator.reconcile.metrics import ReconcileMetrics
from keepstep_sidecar.api.metrics import TABLE
from tests.chart.charts import CHART, Chart, Object, of_kind
from tests.harness import ROOT


@pytest.fixture
def alerts(chart: Chart) -> dict[str, Object]:
    """By name."""
    objects = chart.render({"prometheusRule": {"enabled": True}})
    (group,) = of_kind(objects, "PrometheusRule")["keepstep"]["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_every_metric_in_alerts_and_the_dashboard_is_exported_by_some_process(
    alerts: dict[str, Object],
) -> None:
    made = {row.name for row in TABLE}
    for registry in (
        ReconcileMetrics({}).registry,
        AdmissionMetrics().registry,
        CertificatesMetrics().registry,
    ):
        made |= {family.name for family in registry.collect()}
    dashboard = json.loads((CHART / "files" / "dashboards" / "keepstep.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for asked in (*alerts.values(), *targets):
        used = set(re.findall(r"keepstep_\w+", asked["expr"]))
        assert used
        assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in used} <= {
            name.removesuffix("_total") for name in made
        }


def test_every_alert_links_to_an_existing_section_of_the_runbook(alerts: dict[str, Object]) -> None:
    page = (ROOT / "docs" / "troubleshoot.md").read_text()
    assert sorted(re.findall(r"^### (Keepstep\w+)$", page, re.MULTILINE)) == sorted(alerts)
    for name, alert in alerts.items():
        url = alert["annotations"]["runbook_url"]
        assert url.endswith(f"/docs/latest/troubleshoot/#{name.lower()}")
