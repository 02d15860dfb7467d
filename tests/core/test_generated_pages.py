"""What the site takes from the code is there to be taken; `make docs` is strict about the rest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

import keepstep
import keepstep.dcp
from keepstep_sidecar import error_responses
from scripts import chart_reference, frameworks, log_reference, site
from tests.harness import ROOT

INTEGRATIONS = ROOT / "lib/src/keepstep/integrations"


def test_the_readme_of_the_chart_is_what_its_script_writes() -> None:
    shown = chart_reference.PLACE.read_text()
    assert shown == chart_reference.readme(), "run: python scripts/chart_reference.py"


def test_the_table_of_frameworks_is_current_and_refers_to_existing_tests() -> None:
    assert frameworks.PAGE.read_text() == frameworks.reference(), "run: scripts/frameworks.py"
    assert frameworks.unknown() == []


def test_the_pages_include_exactly_the_tables_that_the_code_generates() -> None:
    named = {
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in site.TABLE.findall(page.read_text())
    }
    made = site.tables()
    assert named == made.keys()
    assert all("| --- |" in text for text in made.values())


@pytest.mark.parametrize("part", log_reference.PARTS)
def test_the_page_of_log_events_has_every_event_that_the_code_logs_and_no_other(part: str) -> None:
    known = tomllib.loads((ROOT / "scripts/log_events.toml").read_text())[part]
    assert log_reference.logged(part).keys() == known.keys()


def test_the_python_page_has_every_module_that_training_code_imports() -> None:
    named = re.findall(r"^::: (.+)$", (ROOT / "docs/python-api.md").read_text(), re.MULTILINE)
    integrations = sorted(path.stem for path in INTEGRATIONS.glob("[a-z]*.py"))
    assert named == [
        "keepstep", "keepstep.dcp", *(f"keepstep.integrations.{name}" for name in integrations)
    ]  # fmt: skip


def test_every_public_name_has_a_docstring() -> None:
    offered = [
        (module.__name__, name, getattr(module, name).__doc__)
        for module in (keepstep, keepstep.dcp)
        for name in module.__all__
    ]
    defined = [
        definition
        for path in sorted(INTEGRATIONS.glob("[a-z]*.py"))
        for definition in _defined(path)
    ]
    assert len(offered) > 15
    assert len(defined) > 15
    assert not [(module, name) for module, name, doc in (*offered, *defined) if not doc]


def _defined(path: Path) -> Iterator[tuple[str, str, str | None]]:
    """Read without an import, as the framework may not be installed here."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield path.stem, node.name, ast.get_docstring(node)


def test_every_code_of_a_refusal_has_a_status_and_a_row() -> None:
    raised = {
        code
        for path in (ROOT / "sidecar/src").rglob("*.py")
        for code in re.findall(r'\brefusal_error\(\s*"([a-z-]+)"', path.read_text())
    }
    assert "pins" in raised
    assert raised <= error_responses.STATUS.keys()
    rows = (ROOT / "docs/protocol.md").read_text().split("## Problems")[1].split("\n## ")[0]
    named = {
        code
        for row in rows.splitlines()
        if row.startswith("| `")
        for code in re.findall(r"`([a-z-]+)`", row.split("|")[1])
    }
    assert named == error_responses.STATUS.keys()
