"""Real processes, real SIGKILL, real disk: what a kill costs, and what it must never cost.

Thousands of them are `make soak` (`tests.faults.kills`); these few are in `make test`.
"""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import kills
from tests.faults.soak import Soak
from tests.harness import SidecarProcess, eventually


@pytest.fixture
def soak(memory_dir: Path, tmp_path: Path) -> Iterator[Soak]:
    seed = int(os.environ.get("KEEPSTEP_SEED", random.randrange(1 << 30)))
    print(f"KEEPSTEP_SEED={seed}")
    sidecar = SidecarProcess("soak", memory_dir, tmp_path / "volume", tmp_path / "log")
    sidecar.start()
    yield Soak(sidecar, tmp_path, random.Random(seed))
    sidecar.end()


@pytest.mark.timeout(300)
def test_ten_kills_at_random_moments_break_no_guarantee(soak: Soak) -> None:
    struck: Counter[str] = Counter()
    kills.run(soak, struck, kills=10, seconds=240, report=lambda seconds: None)
    assert soak.watermark >= 0, "something was committed"
    assert soak.trained > 10
    lost = [*soak.lost.elements()] or [0]
    assert statistics.median(lost) <= 1


@pytest.mark.parametrize("what", kills.WHILE_TRAINING)
def test_training_continues_and_commits_steps_after_each_kind_of_kill(
    soak: Soak, what: str
) -> None:
    with soak.living() as life:
        soak.until_steps(life, 3)
        for _ in range(2):
            kills.WHILE_TRAINING[what](soak, life)
        assert all(process.poll() is None for process in life.processes)
        last = life.steps(0)[-1]
        eventually(
            lambda: (
                (local := soak.sidecar.get("/v1/status")["watermarks"].get("local"))
                and local["step"] >= last
            ),
            what="it commits what comes after the kill",
        )
        life.end()
        soak.learn(life)
    soak.check_memory()
    soak.check_promised()
