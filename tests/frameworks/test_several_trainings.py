"""Several trainings in one process: each has a run of its own, or is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import TRAINER, Lives

STEPS = 6
FRAMEWORKS = ["transformers", "lightning"]


@pytest.fixture
def folds(lives) -> Lives:
    return lives("folds.py", "peft", "lightning.pytorch", *TRAINER)


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "folds").read_text().splitlines()]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_second_training_without_a_run_name_is_refused_also_after_a_restart(folds, framework):
    kept, output = folds.kept(framework=framework, code=1)
    assert "a run keeps one training, and this process would train" in output
    assert 'run="dpo", dir="ckpt"' in output
    ended = lines(kept)
    assert [fold["fold"] for fold in ended] == [0] * len(ended)
    assert [fold["done"] for fold in ended] == [STEPS] + [0] * (len(ended) - 1)
    assert len({fold["weights"] for fold in ended}) == 1


@pytest.mark.parametrize("mixed", [FRAMEWORKS, FRAMEWORKS[::-1]])
def test_a_training_of_another_framework_in_the_same_process_is_refused(folds, mixed):
    _, output = folds.kept(mixed=mixed, code=1)
    assert "a run keeps one training, and this process would train" in output


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_named_trainings_resume_after_a_kill_during_the_second(folds, framework):
    plain = lines(folds.undisturbed(framework=framework))
    kept, output = folds.kept(framework=framework, named=True, kill=[STEPS + 3])
    first, *rest = lines(kept)
    assert first == plain[0]
    complete, second, third = rest
    # each fold's training begins where the fold before left the random generators
    assert complete == {**plain[0], "done": 0}
    assert second["done"] < STEPS
    assert {**second, "done": STEPS} == plain[1]
    assert third == plain[2]
    assert output.count("this run is complete (step 6") == 1
    end_runs(folds, kept)


def test_named_trainings_resume_without_keepstep_run(folds):
    plain = lines(folds.undisturbed(framework="transformers"))
    settings = {"framework": "transformers", "named": True, "kill": [STEPS + 2]}
    command = folds.command("kept", settings, 1)
    options: dict[str, Any] = {"cwd": folds._home, "capture_output": True, "text": True}
    variables = {
        key: variable for key, variable in folds.variables().items() if key != "KEEPSTEP_SOCKET"
    }
    codes = [
        subprocess.run(command, env=variables, timeout=200, **options).returncode for _ in range(2)
    ]
    kept = folds._home / "kept"
    end_runs(folds, kept)
    assert codes == [-9, 0]
    assert {line["fold"]: line["weights"] for line in lines(kept)} == {
        fold["fold"]: fold["weights"] for fold in plain
    }


def end_runs(folds: Lives, kept: Path) -> None:
    for run in sorted(os.listdir(kept / "runs")):
        folds.keepstep("stop", "--dir", str(kept / "runs"), "--run", run)
