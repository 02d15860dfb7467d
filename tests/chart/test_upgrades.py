"""From an older chart to this one, by the command that the documents name.

`--reset-then-reuse-values` takes the new chart's defaults, and over them what the user set.
`--reuse-values` takes the old release's values, its chart's defaults included, as the defaults of
the new chart: what a release adds is missing then.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import helm_python
import pytest
import yaml

from tests.chart.charts import CHART, NAMESPACE, RELEASE, ROOT, Object

_SET_BY_A_USER: Object = {"hostPaths": ["/mnt/nvme0"], "admission": {"replicas": 3}}
_TEXTS = ("docs/operations.md", "docs/quickstart.md", "README.md",
          "charts/keepstep/templates/NOTES.txt", "charts/keepstep/README.md")  # fmt: skip


def _render(chart: Path, values: Object) -> None:
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        loaded.render(values, name=RELEASE, namespace=NAMESPACE)


def _older_values(added: str) -> Object:
    values: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    del values[added]
    return values


@pytest.mark.parametrize("added", ["helpers", "test"])
def test_with_the_old_charts_defaults_a_new_value_is_missing(added: str, tmp_path: Path) -> None:
    """Why `--reuse-values` is in no document."""
    chart = tmp_path / "keepstep"
    shutil.copytree(CHART, chart)
    (chart / "values.yaml").write_text(yaml.safe_dump(_older_values(added)))
    with pytest.raises(helm_python.HelmError):
        _render(chart, _SET_BY_A_USER)


def test_what_a_user_set_on_an_older_chart_is_taken_by_this_one() -> None:
    _render(CHART, _SET_BY_A_USER)


@pytest.mark.parametrize("text", _TEXTS)
def test_every_upgrade_in_the_documents_keeps_what_the_user_set(text: str) -> None:
    said = (ROOT / text).read_text().replace("\\\n", " ")
    upgrades = re.findall(r"^ *(?:\$ )?helm upgrade (.*)$", said, re.MULTILINE)
    assert upgrades or text in ("README.md", "charts/keepstep/README.md")
    for options in upgrades:
        assert "--reset-then-reuse-values" in options
    assert not re.search(r"helm upgrade[^`]*[^-]--reuse-values", said)
