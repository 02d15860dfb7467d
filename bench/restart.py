"""Time from kill -9 of a trainer to the next finished step: cold beside `keepstep run --warm`.

    python -m bench.restart [--rounds 5]

The figures are medians of interleaved rounds. The training is the example GPT in its default size,
with each step kept, as one process and as two ranks under torchrun. Rank 0 is killed after it has
finished 25 steps. Bar: two ranks, warm, at most 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

TRAIN = Path(__file__).parents[1] / "examples" / "train_gpt.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_KILL_AT, _STEPS = 25, 60
_LIMIT_S = 180.0
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    kinds = [(ranks, warm) for ranks in (1, 2) for warm in (False, True)]
    seconds: dict[tuple[int, bool], list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for ranks, warm in kinds:
            seconds[ranks, warm].append(gap_s(ranks, warm=warm))
    print("| kill -9 to the next step | cold | warm |\n| --- | --- | --- |")
    for ranks in (1, 2):
        cold, warm = (seconds[ranks, kind] for kind in (False, True))
        name = "one process" if ranks == 1 else "two ranks, torchrun"
        print(f"| {name} | {_shown(cold)} | {_shown(warm)} |")


def _shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def gap_s(ranks: int, *, warm: bool) -> float:
    """Run a training and kill it once. Returns the seconds until a step is finished again."""
    home = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    journal = home / "log.jsonl"
    options = ["--dir", str(home), "--run", "gpt", "--restarts", "1", *["--warm"][: int(warm)]]
    launch = [sys.executable, *(TORCHRUN if ranks > 1 else ()), str(TRAIN)]
    train = [*launch, "--steps", str(_STEPS), "--log-file", str(journal)]
    with (home / "out").open("w") as out:
        command = subprocess.Popen(
            [sys.executable, "-m", "keepstep_sidecar.cli", "run", *options, "--", *train],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            _await(
                command, lambda: any(event.get("step", 0) >= _KILL_AT for event in _events(journal))
            )
            before = _events(journal)
            killed = time.time()
            os.kill(next(line["pid"] for line in reversed(before) if "pid" in line), signal.SIGKILL)
            first = _await(command, lambda: _first_after(journal, killed))
            if command.wait(_LIMIT_S):
                raise RuntimeError((home / "out").read_text()[-2000:])
            return first - killed
        finally:
            if command.poll() is None:
                command.terminate()
                command.wait(_LIMIT_S)
            shutil.rmtree(home)


def _await(command: subprocess.Popen[bytes], reached: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + _LIMIT_S
    while not (found := reached()):
        if command.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended early, or takes too long ({command.poll()})")
        time.sleep(0.005)
    return found


def _events(journal: Path) -> list[dict[str, Any]]:
    """What the training has logged, without an incomplete last line."""
    if not journal.exists():
        return []
    whole = journal.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _first_after(journal: Path, killed: float) -> float | None:
    """When the first step of the next life was finished, in unix seconds; None if none is yet."""
    events = _events(journal)
    lives = [at for at, event in enumerate(events) if "first" in event and event["wall"] > killed]
    return next((event["wall"] for at in lives for event in events[at:] if "step" in event), None)


if __name__ == "__main__":
    main()
