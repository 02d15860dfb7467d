"""`keepstep run --restore-from RUN/STEP`: a new run begins from a step of another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm
from tests.cli.conftest import Keepstep
from tests.cli.test_rollback import TRAIN

PATIENT = TRAIN.replace("save(step)\n", 'save(step)\n    checkpointer.wait(step, "archived")\n')
OTHER_MODEL = TRAIN.replace("Linear(64, 64)", "Linear(64, 32)")


@pytest.fixture
def archive(keepstep: Keepstep) -> Path:
    """Steps 0 to 3 of run `first`."""
    path = keepstep.home / "archive"
    path.mkdir()
    keepstep.script("train.py", PATIENT)
    train(keepstep, path, "first", "--archive-keep", "9", last=4)
    return path


def train(  # type: ignore[no-untyped-def]
    keepstep: Keepstep, archive: Path, run: str, *more: str, last: int, fail: int = -1, **how
):
    where = ("--archive", str(archive), "--archive-every", "1", "--run", run)
    words = ("--", warm.python(), "train.py", str(last), str(fail))
    return keepstep("run", *where, *more, *words, **how)


def test_a_fork_starts_from_the_original_run_once_and_then_resumes_from_its_own_steps(
    keepstep: Keepstep, archive: Path
) -> None:
    fork = ("--restore-from", "first/2")
    shown = train(keepstep, archive, "second", *fork, "--restarts", "1", last=6, fail=4)
    assert shown.stdout == "from 2\nfrom 4\n"
    assert train(keepstep, archive, "second", *fork, last=8).stdout == "from 5\n"
    assert train(keepstep, archive, "first", last=5).stdout == "from 3\n"
    answer = keepstep.json("archive", "ls", "--archive", str(archive), "--run", "second")
    first = keepstep.json("archive", "ls", "--archive", str(archive), "--run", "first")
    began = next(step["id"] for step in first["steps"] if step["step"] == 2)
    assert (answer["origin"], first["origin"]) == (f"first/{began}", "")
    table = keepstep("archive", "ls", "--archive", str(archive), "--run", "second").stdout
    assert f"run second began from first/{began}" in " ".join(table.split())


def test_a_fork_from_an_unusable_step_fails_and_does_not_start_at_step_0(
    keepstep: Keepstep, archive: Path
) -> None:
    gone = train(keepstep, archive, "second", "--restore-from", "first/77", last=6, code=1)
    assert "this run shall begin from first/77, but" in gone.stderr
    keepstep.script("train.py", OTHER_MODEL)
    unlike = train(keepstep, archive, "third", "--restore-from", "first/2", last=6, code=1)
    assert "refused: " in unlike.stderr
    assert "weight" in unlike.stderr
    assert gone.stdout + unlike.stdout == ""
    assert sorted(path.name for path in archive.iterdir()) == ["first"]
