"""docs/metrics.md lists the metrics of the code."""

from __future__ import annotations

from scripts.metrics_reference import PLACE, reference


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    assert PLACE.read_text() == reference(), "run: python scripts/metrics_reference.py"
