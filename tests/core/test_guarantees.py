"""The table of guarantees is what docs/guarantees.json proves, and its rows name real tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripts import guarantees

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_what_was_proved() -> None:
    page = guarantees.PAGE.read_text()
    results = json.loads(guarantees.RESULTS.read_text())
    assert guarantees.place(page, guarantees.render(results)) == page


def test_every_row_names_tests_that_exist() -> None:
    for row in guarantees.ROWS:
        for name in row.tests:
            module, test = name.split("::")
            text = (ROOT / (module.replace(".", "/") + ".py")).read_text()
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), name


def test_a_test_that_failed_or_did_not_run_proves_nothing(tmp_path: Path) -> None:
    cases = "".join(
        f'<testcase classname="{name.split("::")[0]}" name="{name.split("::")[1]}"/>'
        for row in guarantees.ROWS
        for name in row.tests
    )
    whole = tmp_path / "whole.xml"
    whole.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert len(guarantees.render(guarantees.collect(guarantees.read([whole]))).splitlines()) == (
        2 + len(guarantees.ROWS)
    )
    failed = tmp_path / "failed.xml"
    failed.write_text(whole.read_text().replace("/>", "><failure/></testcase>", 1))
    left = guarantees.render(guarantees.collect(guarantees.read([failed])))
    assert guarantees.ROWS[0].dies not in left
    assert len(left.splitlines()) == 1 + len(guarantees.ROWS)
    assert guarantees.collect({}) == {}
