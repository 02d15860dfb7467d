"""The tables of docs/metrics.md, from the code: every metric, by the process that exports it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from keepstep_operator.admission.metrics import AdmissionMetrics
from keepstep_operator.certificates.main import CertificatesMetrics as CertificateMetrics
from keepstep_operator.reconcile.metrics import ReconcileMetrics
from keepstep_sidecar.api.metrics import TABLE

Line = tuple[str, str, str]
"""The name under which a metric is scraped, its type, and its help."""


def reference() -> str:
    """The tables, in Markdown."""
    parts = [
        ("Sidecar", sorted(_sidecar())),
        ("keepstep-reconcile", sorted(_of(ReconcileMetrics({}).registry))),
        ("keepstep-admission", sorted(_of(AdmissionMetrics().registry))),
        ("keepstep-certificates", sorted(_of(CertificateMetrics().registry))),
    ]
    return "".join(_section(name, lines) for name, lines in parts)


def _sidecar() -> Iterator[Line]:
    for row in TABLE:
        yield _scraped(row.name, row.kind), row.kind, row.help


def _of(registry: CollectorRegistry) -> Iterator[Line]:
    for metric in registry.collect():
        yield _scraped(metric.name, metric.type), metric.type, metric.documentation


def _scraped(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def _section(name: str, lines: list[Line]) -> str:
    table = "\n".join(f"| `{line[0]}` | {line[1]} | {line[2]} |" for line in lines)
    return f"\n## {name}\n\n| metric | type | |\n| --- | --- | --- |\n{table}\n"
