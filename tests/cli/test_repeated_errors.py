"""`keepstep run --restarts`: an error that each start repeats ends the run; others are retried."""

from __future__ import annotations

import sys

import pytest

from tests import warm
from tests.cli.conftest import TRAIN, Keepstep

PYTHON = sys.executable

COUNT = """
import pathlib, sys
with pathlib.Path("starts").open("a") as file:
    file.write("x")
import keepstep
"""


def starts(keepstep: Keepstep) -> int:
    return len((keepstep.home / "starts").read_text())


def run(keepstep: Keepstep, text: str, *, code: int = 1, launcher: tuple[str, ...] = ()) -> str:
    """Stderr of a run of this script with three restarts; tracebacks are the script's."""
    script = keepstep.script("train.py", COUNT + text)
    words = ("run", "--run", "a", "--restarts", "3", "--", PYTHON, *launcher, script)
    with keepstep.start(*words) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keepstep.Checkpointer(model=7)", "UsageError: 'model' is a int without state_dict()"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "from keepstep.integrations import require_framework_hooks\\n"
            "require_framework_hooks('trl', '1.0', hooks={'json:': ['fit']})",
            "UsageError: trl 1.0 lacks what keepstep needs of it",
        ),
        (
            "try:\\n    keepstep.Checkpointer(model=7)\\n"
            "except Exception as error:\\n    raise RuntimeError('wrapped') from error",
            "RuntimeError: wrapped",
        ),
    ],
)
def test_a_usage_error_before_the_trainer_has_a_lease_is_not_retried(
    keepstep: Keepstep, text: str, message: str
) -> None:
    err = run(keepstep, text.replace("\\n", "\n"))
    assert starts(keepstep) == 1
    last = [line for line in err.splitlines() if line.startswith("keepstep: ")][-1]
    assert last == err.splitlines()[-1]
    assert "not started again, because the next start would end in the same way" in last
    assert message in last


def test_a_checkpoint_of_another_model_is_not_retried(keepstep: Keepstep) -> None:
    keepstep.script("first.py", TRAIN)
    keepstep("run", "--run", "a", "--", warm.python(), "first.py", "3", "-1")
    text = TRAIN.replace("Linear(64, 64)", "Linear(64, 32)")
    err = run(keepstep, text.replace("int(sys.argv[1]), int(sys.argv[2])", "9, -1"))
    assert starts(keepstep) == 1
    assert "would end in the same way: MismatchError: model and checkpoint disagree" in err


def test_a_refusal_after_a_kept_step_is_retried(keepstep: Keepstep) -> None:
    text = """
checkpointer = keepstep.Checkpointer({"state": {"n": 1}}, strict=True)
at = checkpointer.restore()
step = at.step + 1 if at else 0
checkpointer.save(step)
checkpointer.wait(step, "staged")
checkpointer.save(step - 1)
"""
    run(keepstep, text)
    assert starts(keepstep) == 4


def test_a_script_that_ends_by_itself_before_it_has_a_lease_is_tried_twice(
    keepstep: Keepstep,
) -> None:
    err = run(keepstep, "sys.exit(3)", code=3)
    assert starts(keepstep) == 2
    assert "it failed with 3 twice in a row before any trainer took its rank" in err


def test_a_complete_run_that_is_started_again_reports_that_no_step_was_saved(
    keepstep: Keepstep,
) -> None:
    keepstep.script("first.py", TRAIN)
    words = ("run", "--", warm.python(), "first.py", "3", "-1")
    assert "saved nothing" not in keepstep(*words).stderr
    err = keepstep(*words).stderr
    assert "it went on from step 2 and saved nothing: if this run is complete" in err
    assert "keepstep run --run NAME" in err
    assert "saved nothing" not in keepstep(*words[:-2], "4", "-1").stderr
