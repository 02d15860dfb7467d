"""README's table of guarantees is what docs/guarantees.json proves, and both name real tests."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def guarantees() -> ModuleType:
    """scripts/guarantees.py."""
    spec = importlib.util.spec_from_file_location("guarantees", ROOT / "scripts" / "guarantees.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_what_was_proved(guarantees: ModuleType) -> None:
    readme = guarantees.README.read_text()
    results = json.loads(guarantees.RESULTS.read_text())
    assert guarantees.place(readme, guarantees.render(results)) == readme


def test_every_row_names_tests_that_exist(guarantees: ModuleType) -> None:
    for row in guarantees.ROWS:
        for name in row.tests:
            module, test = name.split("::")
            text = (ROOT / (module.replace(".", "/") + ".py")).read_text()
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), name


def test_a_test_that_failed_or_did_not_run_proves_nothing(
    guarantees: ModuleType, tmp_path: Path
) -> None:
    cases = "".join(
        f'<testcase classname="{name.split("::")[0]}" name="{name.split("::")[1]}"/>'
        for row in guarantees.ROWS
        for name in row.tests
    )
    whole = tmp_path / "whole.xml"
    whole.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert guarantees.collect(guarantees.read([whole]))
    failed = tmp_path / "failed.xml"
    failed.write_text(whole.read_text().replace("/>", "><failure/></testcase>", 1))
    with pytest.raises(SystemExit, match="failure"):
        guarantees.collect(guarantees.read([failed]))
    with pytest.raises(SystemExit, match="did not run"):
        guarantees.collect({})
