"""The pages that scripts write are what the scripts would write now."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts import (
    api_reference,
    chart_reference,
    conformance,
    frameworks,
    metrics_reference,
    python_reference,
)

PAGES: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "api_reference": (api_reference.TARGET.read_text, api_reference.reference),
    "chart_reference": (chart_reference.PLACE.read_text, chart_reference.readme),
    "frameworks": (frameworks.PAGE.read_text, frameworks.reference),
    "metrics_reference": (metrics_reference.PLACE.read_text, metrics_reference.reference),
    "python_reference": (python_reference.PLACE.read_text, python_reference.reference),
    "conformance": (
        conformance.PAGE.read_text,
        lambda: conformance.place(conformance.PAGE.read_text(), conformance.render()),
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_script_writes(name: str) -> None:
    shown, made = PAGES[name]
    assert shown() == made(), f"run: python scripts/{name}.py"


def test_the_results_of_frameworks_are_those_of_tests_that_there_are() -> None:
    assert frameworks.unknown() == []
