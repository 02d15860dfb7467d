"""Two live runs of one name over one archive: neither takes the other's steps, or loses its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.cli.conftest import Keepstep
from tests.harness import eventually

TRAIN = """
import pathlib, sys, time
import torch
import keepstep

model = torch.nn.Linear(4, 4)
checkpointer = keepstep.Checkpointer(model=model)
at = checkpointer.restore()
print("from", at.step if at else None, flush=True)
step = at.step if at else -1
while not pathlib.Path(sys.argv[1]).exists():
    step += 1
    checkpointer.save(step)
    checkpointer.wait(step, timeout=30)
    time.sleep(0.1)
checkpointer.close(timeout=1)
"""
NAME = ("--run", "gpt")


class Runs:
    """Runs of one name over one archive, each in a directory of its own."""

    def __init__(self, keepstep: Keepstep) -> None:
        self.keepstep, self.archive = keepstep, keepstep.home / "far"
        self.archive.mkdir()
        keepstep.script("train.py", TRAIN)

    def start(self, place: str) -> subprocess.Popen[str]:
        where = ("--dir", place, *NAME, "--archive", str(self.archive), "--archive-every", "1")
        # enough that a step is there for as long as a slow machine reads it
        where += ("--archive-keep", "1000")
        words = ("--", warm.python(), "train.py", f"end-{place}")
        return self.keepstep.start("run", *where, "--persist-every", "1", *words)

    def end(self, place: str, process: subprocess.Popen[str]) -> tuple[str, str]:
        (self.keepstep.home / f"end-{place}").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        (self.keepstep.home / f"end-{place}").unlink()
        return out, err

    def archived(self) -> list[str]:
        return sorted(path.parent.name for path in self.archive.glob("gpt/*/step.json"))

    def lives(self) -> list[Path]:
        return list(self.archive.glob("gpt/lives/*.json"))

    def record(self, place: str) -> Any:
        return json.loads((self.keepstep.home / place / "gpt" / "run.json").read_text())

    def status(self, place: str) -> Any:
        return self.keepstep.json("status", "--dir", place, *NAME)["sidecar"]


@pytest.fixture
def runs(keepstep: Keepstep) -> Iterator[Runs]:
    made = Runs(keepstep)
    yield made
    for place in ("k1", "k2"):
        (keepstep.home / f"end-{place}").touch()
        with contextlib.suppress(AssertionError):
            keepstep("stop", "--dir", place, *NAME, code=None)


def test_a_second_run_is_refused_while_the_first_trains_and_resumes_after_it_ended(
    runs: Runs,
) -> None:
    first = runs.start("k1")
    eventually(lambda: runs.archived() and runs.lives(), within_s=60)
    second = runs.start("k2")
    out, err = second.communicate(timeout=90)
    assert second.returncode == 1
    assert "another run named 'gpt' trains on " in err
    assert "--run NAME" in err
    assert out == ""
    answer = runs.status("k1")
    assert not any("another run" in warning for warning in answer["warnings"])
    runs.end("k1", first)
    eventually(lambda: not runs.lives(), within_s=10)
    assert {name[:5] for name in runs.archived()} == {"0001."}, "the second one wrote nothing"
    newest = runs.archived()[-1]
    runs.end("k2", runs.start("k2"))
    assert runs.record("k2")["epochs"][-1]["parent"] == newest


def test_a_killed_run_delays_its_restart_on_another_machine_only_for_a_limited_time(
    runs: Runs,
) -> None:
    first = runs.start("k1")
    eventually(lambda: runs.archived() and runs.lives(), within_s=60)
    runs.keepstep.kill()
    first.communicate(timeout=30)
    shutil.rmtree(runs.keepstep.home / "k1")
    assert runs.lives(), "nobody said that it ended"
    second = runs.start("k2")
    eventually(lambda: any(name.startswith("0002.") for name in runs.archived()), within_s=90)
    eventually(lambda: [path.name[:5] for path in runs.lives()] == ["0002."], within_s=20)
    runs.end("k2", second)
    assert runs.record("k2")["epochs"][-1]["parent"].startswith("0001.")


def test_a_run_keeps_its_steps_although_another_run_resumes_from_its_archive(runs: Runs) -> None:
    """The second start cannot see that the first one lives: a file is where that would be told."""
    (runs.archive / "gpt").mkdir()
    (runs.archive / "gpt" / "lives").touch()
    first = runs.start("k1")
    eventually(runs.archived, within_s=150)
    second = runs.start("k2")
    eventually(lambda: any(name.startswith("0002.") for name in runs.archived()), within_s=150)

    def warned() -> bool:
        return any("is used by another run" in warning for warning in runs.status("k1")["warnings"])

    eventually(warned, within_s=90)
    before = runs.status("k1")["watermarks"]["local"]
    eventually(lambda: runs.status("k1")["watermarks"]["local"] > before, within_s=30)
    assert before.startswith("0001."), "it still commits, in its own epoch"
    assert "another run" in runs.status("k1")["tiers"]["archive"]["trouble"]
    runs.end("k1", first)
    newest = runs.keepstep.json("status", "--dir", "k1", *NAME)["committed"]["id"]
    runs.end("k2", second)
    assert [stranger[:5] for stranger in runs.record("k1")["strangers"]] == ["0002."]
    _, err = runs.end("k1", runs.start("k1"))
    parent = runs.record("k1")["epochs"][-1]["parent"]
    assert parent == newest, "from its own newest step, not from the other run's"
    assert "is used by another run" in err
