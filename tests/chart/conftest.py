"""The chart, as Helm renders it here."""

from __future__ import annotations

import shutil

import pytest

from tests.chart.charts import Chart, Library, Object, Program

HELMS = ["library", *(["program"] if shutil.which("helm") else [])]


@pytest.fixture(scope="session", params=HELMS)
def chart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """Renders with any values; once with each Helm that is here."""
    if request.param == "library":
        return Chart(Library())
    return Chart(Program(tmp_path_factory.mktemp("helm")))


@pytest.fixture(scope="session")
def plain() -> list[Object]:
    """The chart with its defaults."""
    return Chart(Library()).render()
