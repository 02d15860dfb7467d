"""Upgrades of the chart, by the command that the documents name.

`--reset-then-reuse-values` takes the new chart's defaults, and over them what the user set.
`--reuse-values` takes the old release's values, its chart's defaults included, as the defaults of
the new chart: what a release adds is missing then.
"""

from __future__ import annotations

import re
from pathlib import Path

import helm_python
import pytest

from tests.chart.charts import CHART, NAMESPACE, RELEASE, ROOT, Object

_SET_BY_A_USER: Object = {"hostPaths": ["/mnt/nvme0"], "admission": {"replicas": 3}}
_TEXTS = ("docs/operations.md", "docs/quickstart.md", "README.md",
          "charts/keepstep/templates/NOTES.txt", "charts/keepstep/README.md")  # fmt: skip


def _render(chart: Path, values: Object) -> None:
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        loaded.render(values, name=RELEASE, namespace=NAMESPACE)


def test_a_few_values_of_a_user_suffice() -> None:
    _render(CHART, _SET_BY_A_USER)


@pytest.mark.parametrize("text", _TEXTS)
def test_every_upgrade_in_the_documents_keeps_what_the_user_set(text: str) -> None:
    said = (ROOT / text).read_text().replace("\\\n", " ")
    upgrades = re.findall(r"^ *(?:\$ )?helm upgrade (.*)$", said, re.MULTILINE)
    assert upgrades or text in ("README.md", "charts/keepstep/README.md")
    for options in upgrades:
        assert "--reset-then-reuse-values" in options
    assert not re.search(r"helm upgrade[^`]*[^-]--reuse-values", said)
