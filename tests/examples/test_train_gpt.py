"""The example as users start it: real processes, a tiny model, bit-equal losses."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
TINY = ("--layers", "1", "--width", "32", "--context", "16", "--batch", "8")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def train_gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def train(log_file: Path, *options: str, launcher: tuple[str, ...] = ()) -> dict[int, str]:
    """Run the example to its end; the bits of the loss of every step."""
    python = warm.python()
    command = [python, *launcher, str(SCRIPT), *TINY, "--log-file", str(log_file), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return losses(log_file)


def events_of(log_file: Path) -> list[dict[str, Any]]:
    whole_lines = log_file.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole_lines.splitlines()]


def losses(log_file: Path) -> dict[int, str]:
    """Fails when a step that was done again has another loss than before."""
    found: dict[int, str] = {}
    for event in events_of(log_file):
        if "step" in event:
            assert found.setdefault(event["step"], event["loss_hex"]) == event["loss_hex"]
    return found


def test_the_example_with_two_ranks_is_deterministic_and_its_loss_decreases(tmp_path: Path) -> None:
    first = train(tmp_path / "1", "--steps", "12", "--no-keepstep", launcher=TORCHRUN)
    other = train(tmp_path / "2", "--steps", "12", "--no-keepstep", launcher=TORCHRUN)
    assert first == other
    assert sorted(first) == list(range(12))
    assert float.fromhex(first[11]) < float.fromhex(first[0]) - 0.2


def test_a_killed_trainer_resumes_with_bit_equal_losses(tmp_path: Path) -> None:
    steps = ("--steps", "400")
    expected = train(tmp_path / "reference", "--no-keepstep", *steps)
    log_file = tmp_path / "log"
    kept = ("-m", "keepstep_sidecar.cli", "run", "--dir", str(tmp_path / "steps"))
    launcher = (*kept, "--restarts", "1", "--", warm.python())
    killer = threading.Thread(target=kill_trainer_after, args=(log_file, 20))
    killer.start()
    losses_of_run = train(log_file, *steps, launcher=launcher)
    killer.join()
    starts = [event for event in events_of(log_file) if "first" in event]
    assert [start["tier"] for start in starts] == [None, "memory"]
    assert starts[1]["first"] >= 20
    assert losses_of_run == expected


def kill_trainer_after(log_file: Path, step: int) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        events = events_of(log_file) if log_file.exists() else []
        if any(event.get("step", -1) >= step for event in events):
            os.kill(events[0]["pid"], signal.SIGKILL)
            return
        time.sleep(0.01)
