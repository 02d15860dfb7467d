"""Each row of the table: a killed training beside an undisturbed one, and beside its control."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.rows import every_row
from tests.conformance.table import NOT_WORSE, Row
from tests.conformance.trial import Trial, of_control, of_keepstep, report

ROWS = [row for row in every_row() if not row.packages]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_restarted_training_is_what_its_row_says(row: Row, tmp_path: Path) -> None:
    check(Trial(row, tmp_path))


def check(trial: Trial) -> None:
    row = trial.row
    undisturbed = trial.undisturbed()
    control, kept = trial.control(), trial.keepstep()
    seen = of_keepstep(row, undisturbed, control, kept)
    assert seen is row.keepstep, f"keepstep: {seen.value}\n{report(undisturbed, kept)}"
    by_control = of_control(undisturbed, control)
    assert by_control is row.control, f"control: {by_control.value}\n{report(undisturbed, control)}"


@pytest.mark.parametrize("row", every_row(), ids=lambda row: row.name)
def test_no_row_is_worse_than_its_control(row: Row) -> None:
    assert row.control in NOT_WORSE[row.keepstep]
