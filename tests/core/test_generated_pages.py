"""The pages that scripts write are what the scripts would write now."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from scripts import (
    api_reference,
    chart_reference,
    conformance,
    frameworks,
    guarantees,
    metrics_reference,
    python_reference,
)
from tests.harness import ROOT

PAGES: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "api_reference": (api_reference.TARGET.read_text, api_reference.reference),
    "chart_reference": (chart_reference.PLACE.read_text, chart_reference.readme),
    "metrics_reference": (metrics_reference.PLACE.read_text, metrics_reference.reference),
    "python_reference": (python_reference.PLACE.read_text, python_reference.reference),
    "conformance": (
        conformance.PAGE.read_text,
        lambda: conformance.place(conformance.PAGE.read_text(), conformance.render()),
    ),
    "guarantees": (
        guarantees.PAGE.read_text,
        lambda: guarantees.place(
            guarantees.PAGE.read_text(),
            guarantees.render(json.loads(guarantees.RESULTS.read_text())),
        ),
    ),
    "frameworks": (
        frameworks.PAGE.read_text,
        lambda: frameworks.place(
            frameworks.PAGE.read_text(),
            frameworks.render(json.loads(frameworks.RESULTS.read_text())),
        ),
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_script_writes(name: str) -> None:
    shown, made = PAGES[name]
    assert shown() == made(), f"run: python scripts/{name}.py"


def test_a_guarantee_names_tests_that_exist() -> None:
    for row in guarantees.ROWS:
        for name in row.tests:
            module, test = name.split("::")
            text = (ROOT / (module.replace(".", "/") + ".py")).read_text()
            assert f"def {test}(" in text, name


def test_a_framework_is_tested_within_the_range_that_its_adapter_takes() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements-frameworks.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )

    def release(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    ranges = frameworks.ranges()
    assert len(ranges) >= 6
    for package, least, below in ranges:
        assert release(least) <= release(pins[package]) < release(below), package
