"""docs/conformance.md shows the rows."""

from __future__ import annotations

from scripts import conformance


def test_the_page_shows_each_row_and_its_results() -> None:
    page = conformance.PAGE.read_text()
    assert conformance.place(page, conformance.render()) == page, (
        "run: python scripts/conformance.py"
    )
