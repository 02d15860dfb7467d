"""kill -9 at random moments of a training on a GPU: every restored state is that of its step, bit
for bit, and is the newest or the one before it. `make test-gpu`, on a machine with a GPU;
`TRAIN_ON=cpu make test-gpu` tries the tests themselves on any.

The reference is the same training, never interrupted and without keepstep.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm

ROOT = Path(__file__).parents[2]
ON = os.environ.get("TRAIN_ON", "cuda")
LIVES = [16, 21]
WORLDS = {"ddp": 1, "fsdp": 1, "gloo": 2}
VARIANTS = [
    *("plain", "eager", "bf16", "amp", "capturable", "channels-last", "compile", "ddp", "fsdp"),
    *("gloo", *(("stream", "graph", "assert") if ON == "cuda" else ())),
]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def there_is_a_device() -> None:
    if ON == "cpu":
        return
    assert torch.cuda.is_available(), f"torch {torch.__version__} sees no CUDA device"


class Lives:
    """What the lives of one rank wrote."""

    def __init__(self, path: Path) -> None:
        self.lives: list[list[dict[str, Any]]] = []
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "began":
                self.lives.append([])
            self.lives[-1].append(event)

    def kept(self, life: int) -> list[int]:
        return [
            event["step"]
            for event in self.lives[life]
            if event["event"] == "saved" and event["kept"]
        ]

    def last(self, event: str) -> dict[str, Any]:
        (found,) = [entry for entry in self.lives[-1] if entry["event"] == event]
        return found


def train(variant: str, log: Path, *before: str, **variables: str) -> str:
    """One training to its end. Returns what it printed."""
    command = [*before, sys.executable if before else warm.python()]
    if variant in WORLDS:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(WORLDS[variant])]
    command += ["-m", "tests.gpu.trainer", variant, str(log)]
    paths = [str(ROOT / "lib/src"), str(ROOT / "sidecar/src"), str(ROOT)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TRAIN_ON": ON, **variables}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    log_path = Path(f"{log}.out")
    with log_path.open("w") as out:  # a pipe would be held open by whatever outlives the command
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
    try:
        code = process.wait(800)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log_path.read_text()
    assert code == 0, text[-6000:]
    return text


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_restart_resumes_from_the_newest_step(variant: str, tmp_path: Path) -> None:
    train(variant, tmp_path / "plain")
    keepstep = [sys.executable, "-m", "keepstep_sidecar.cli", "run", "--warm"]
    keepstep += ["--restarts", str(len(LIVES))]
    output = train(variant, tmp_path / "kept", *keepstep, "--", LIVES=json.dumps(LIVES))
    assert "cudaHostRegister failed" not in output
    for rank in range(WORLDS.get(variant, 1)):
        plain, kept = Lives(tmp_path / f"plain-{rank}"), Lives(tmp_path / f"kept-{rank}")
        right = {
            event["step"]: event["digest"] for event in plain.lives[0] if event["event"] == "step"
        }
        assert len(kept.lives) == len(LIVES) + 1, output
        for number, life in enumerate(kept.lives[1:]):
            began, before = life[0], kept.kept(number)
            restored = began["first"] - 1
            print(variant, rank, "kept", before[-2:], "restored", restored, began["tier"])
            assert began["digest"] == right[restored], f"step {restored} is not what it was"
            assert len(before) > 1, f"too few steps were kept to tell: {before}\n{output}"
            assert restored >= before[-2], output
            assert began["tier"] == "memory", output
        assert kept.last("ended")["digest"] == plain.last("ended")["digest"]
        closed = kept.last("closed")
        print(variant, rank, closed)
        assert not closed["discarded"], closed["reasons"]
        assert ON == "cpu" or (closed["pinned"] and all(closed["pinned"]))
