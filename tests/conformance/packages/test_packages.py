"""The rows of popular packages, in the environment of `make test-frameworks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.check import check
from tests.conformance.rows import every_row
from tests.conformance.rows.packages import EXTENSIONS
from tests.conformance.table import Row
from tests.conformance.trial import Trial

ROWS = [row for row in every_row() if row.packages]
MODULES = (
    *("torchao.optim", "bitsandbytes", "schedulefree", "heavyball", "pytorch_optimizer"),
    *("galore_torch", "ema_pytorch", "vector_quantize_pytorch", "torchmetrics", "peft"),
    *("torchdata.nodes", "torchdata.stateful_dataloader", "deepspeed.ops.adam"),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_restarted_training_with_a_package_has_the_result_that_its_table_row_expects(
    row: Row, tmp_path: Path
) -> None:
    if "deepspeed" in row.packages and not (EXTENSIONS / "cpu_adam" / "cpu_adam.so").exists():
        pytest.skip("DeepSpeed's CPU Adam is not compiled: make test-frameworks does that")
    check(Trial(row, tmp_path, modules=MODULES))
