"""What training code writes is typed: a checker in strict mode accepts it, and sees mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """\
import torch

import keepstep
import keepstep.dcp
from keepstep import Checkpointer, NotDurableError, RestoreError, Restored

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
progress = {"batches": 0}


def train(checkpointer: Checkpointer, at: Restored | None) -> list[float]:
    losses: list[float] = []
    for step in range(at.step + 1 if at else 0, 10):
        loss = model(torch.ones(1, 8)).sum()
        loss.backward()
        optimizer.step()
        if checkpointer.should_save(step):
            progress["batches"] += 1
        kept: bool = checkpointer.save(step, healthy=bool(torch.isfinite(loss)))
        losses.append(float(loss) if kept else 0.0)
    return losses


with keepstep.Checkpointer({"model": model, "progress": progress}, optimizer=optimizer) as one:
    newest: int | None = one.latest_step()
    try:
        found = one.restore(rng="later")
    except RestoreError as error:
        raise SystemExit(str(error)) from error
    one.restore_rng()
    train(one, found)
    with one.mutating():
        model.bias.data.zero_()
    try:
        one.wait(9, "durable", timeout=5.0)
    except NotDurableError:
        print(one.stats.saves)

writer = keepstep.dcp.StorageWriter(step=100)
"""
MISTAKES = """\
import keepstep

checkpointer = keepstep.Checkpointer({}, replicated=1)
checkpointer.restore(rng="never")
checkpointer.restore().step
step: str = checkpointer.latest_step()
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Lines with errors, by file: as somebody checks scripts of theirs, with nothing of this
    repository's settings. One run for both: it reads all of torch."""
    place = tmp_path_factory.mktemp("typed")
    (place / "train.py").write_text(SCRIPT)
    (place / "mistakes.py").write_text(MISTAKES)
    (place / "mypy.ini").write_text("[mypy]\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "train.py", "mistakes.py"],
        cwd=place,
        env=os.environ | {"MYPYPATH": str(ROOT / "lib" / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "checked 2 source files" in done.stdout, done.stdout + done.stderr
    found: dict[str, set[int]] = {}
    for line in done.stdout.splitlines():
        if ": error: " in line:
            name, number, _ = line.split(":", 2)
            found.setdefault(name, set()).add(int(number))
    return found


def test_a_checker_in_strict_mode_accepts_a_training_script(
    findings: dict[str, set[int]],
) -> None:
    assert findings.keys() <= {"mistakes.py"}


def test_a_type_checker_reports_wrong_calls(findings: dict[str, set[int]]) -> None:
    assert findings["mistakes.py"] == {3, 4, 5, 6}


def test_the_package_contains_a_py_typed_marker() -> None:
    assert (ROOT / "lib" / "src" / "keepstep" / "py.typed").exists()
