"""The example as users start it: real processes, a tiny model, bit-equal losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
TINY = ("--layers", "1", "--width", "32", "--context", "16", "--batch", "8")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = pytest.mark.timeout(120)


def train(log_file: Path, *options: str, launcher: tuple[str, ...] = ()) -> dict[int, str]:
    """Run the example to its end; the bits of the loss of every step."""
    command = [sys.executable, *launcher, str(SCRIPT), *TINY, "--log-file", str(log_file), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return losses(log_file)


def losses(log_file: Path) -> dict[int, str]:
    events = [json.loads(line) for line in log_file.read_text().splitlines()]
    return {event["step"]: event["loss_hex"] for event in events if "step" in event}


def test_two_ranks_give_the_same_bits_in_every_run_and_learn(tmp_path: Path) -> None:
    one = train(tmp_path / "1", "--steps", "12", "--no-keepstep", launcher=TORCHRUN)
    other = train(tmp_path / "2", "--steps", "12", "--no-keepstep", launcher=TORCHRUN)
    assert one == other
    assert sorted(one) == list(range(12))
    assert float.fromhex(one[11]) < float.fromhex(one[0]) - 0.2


def test_another_seed_gives_other_losses(tmp_path: Path) -> None:
    one = train(tmp_path / "1", "--steps", "2", "--no-keepstep")
    other = train(tmp_path / "2", "--steps", "2", "--no-keepstep", "--seed", "2")
    assert one[0] != other[0]


def test_the_log_has_a_line_for_the_start_and_one_for_each_step(tmp_path: Path) -> None:
    train(tmp_path / "log", "--steps", "2", "--no-keepstep")
    start, *steps = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert start["first"] == 0
    assert start["tier"] is None
    assert [step["step"] for step in steps] == [0, 1]
    assert all(float.fromhex(step["loss_hex"]) == step["loss"] for step in steps)
    assert all(step["seconds"] > 0 and step["wall"] > start["wall"] for step in steps)
