"""Each row of the table: a killed training beside an undisturbed one, and beside its control."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.check import check
from tests.conformance.rows import every_row
from tests.conformance.table import NOT_WORSE, Result, Row
from tests.conformance.trial import Trial

ROWS = [row for row in every_row() if not row.packages]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_restarted_training_has_the_result_that_its_table_row_expects(
    row: Row, tmp_path: Path
) -> None:
    check(Trial(row, tmp_path))


def test_no_row_is_worse_than_its_control_and_every_difference_has_a_reason() -> None:
    for row in every_row():
        assert row.control in NOT_WORSE[row.keepstep], row.what
        assert row.reason or row.control is row.keepstep is Result.EQUAL, row.what


def test_each_row_has_a_name_of_its_own() -> None:
    names = [row.name for row in every_row()]
    assert len(names) == len(set(names))
    assert len(names) >= 150
