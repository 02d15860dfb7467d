"""The job script of docs/slurm.md in a real Slurm: it ends, is requeued, and goes on."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.examples.test_train_gpt import SCRIPT, TINY, events_of, losses
from tests.harness import ROOT, eventually
from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.timeout(600)

_STEPS = 150
_OPTIONS = (*TINY, "--steps", str(_STEPS), "--step-seconds", "0.05")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a training that nothing disturbs."""
    log = tmp_path_factory.mktemp("reference") / "log"
    command = [warm.python(), str(SCRIPT), *TINY, "--steps", str(_STEPS), "--no-keepstep"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--log-file", str(log)], env=environment, check=True)
    return losses(log)


@pytest.fixture
def submitted(slurm: Slurm, tmp_path: Path) -> tuple[str, Path]:
    """The page's job on n1, once it has trained for 40 steps, and the log of its training."""
    log = tmp_path / "log"
    (tmp_path / "archive").mkdir()
    script = re.findall(
        "```bash\n#!/bin/bash\n(.*?)```", (ROOT / "docs" / "slurm.md").read_text(), re.S
    )[0]
    for named, here in {
        "/local/keepstep": slurm.local / tmp_path.name,
        "/shared/keepstep": tmp_path / "archive",
        "--archive-every 100": "--archive-every 5",
        "train.py": " ".join(map(str, (SCRIPT, *_OPTIONS, "--log-file", log))),
    }.items():
        assert named in script
        script = script.replace(named, str(here))
    job = slurm.submit(script)
    eventually(
        lambda: _steps(log) >= 40, what=lambda: f"it trains: {slurm.output(job)}", within_s=180
    )
    return job, log


def test_a_job_at_its_time_limit_is_requeued_and_loses_no_step(
    slurm: Slurm, submitted: tuple[str, Path], expected: dict[int, str]
) -> None:
    job, log = submitted
    slurm.command("scancel", "--batch", "--signal=TERM", job)  # as --signal=B:TERM@180 does
    _finishes(slurm, job)
    first, second = (event for event in events_of(log) if "first" in event)
    assert first["tier"] is None
    assert second["tier"] in ("memory", "local")
    last = max(step for step, _ in _before(log, second))
    assert second["first"] >= last, "the step that SIGTERM met, at most"
    assert losses(log) == expected


def test_a_job_whose_node_is_lost_resumes_on_another_node_from_the_archive(
    slurm: Slurm, submitted: tuple[str, Path], expected: dict[int, str]
) -> None:
    job, log = submitted
    slurm.lose("n1")
    _finishes(slurm, job)
    assert slurm.nodes_of(job) == "n2"
    second = [event for event in events_of(log) if "first" in event][1]
    assert second["tier"] == "archive"
    assert second["first"] > 5
    assert losses(log) == expected


def _finishes(slurm: Slurm, job: str) -> None:
    eventually(
        lambda: slurm.state(job) == "PENDING",
        what=lambda: f"it waits again: {slurm.story(job)}",
        within_s=120,
    )
    slurm.begin_soon(job)
    eventually(
        lambda: slurm.state(job) == "COMPLETED",
        what=lambda: f"it ends: {slurm.story(job)}",
        every_s=1.0,
        within_s=180,
    )
    assert slurm.restarts(job) == 1


def _steps(log: Path) -> int:
    return len(events_of(log)) if log.exists() else 0


def _before(log: Path, start: dict[str, object]) -> list[tuple[int, str]]:
    events = events_of(log)
    return [(e["step"], e["loss_hex"]) for e in events[: events.index(start)] if "step" in e]
