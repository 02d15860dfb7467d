"""Real processes, real SIGKILL, real disk: what a kill costs, and what it must never cost."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import time
from pathlib import Path

import pytest

from tests.faults.soak import WORLD, Soak
from tests.harness import eventually

RESULT = Path(__file__).resolve().parents[2] / "docs" / "soak.json"


@pytest.fixture
def soak(sidecars, tmp_path):
    seed = int(os.environ.get("KEEPSTEP_SEED", random.randrange(1 << 30)))
    print(f"KEEPSTEP_SEED={seed}")
    return Soak(sidecars().start(), tmp_path, eventually, random.Random(seed))


def kill_one_way(soak, life, way):
    """Kill what `way` names at a random moment. Returns whether sidecar and memory lived through
    it, so that only the step in flight may be lost."""
    dice = soak.random
    soak.until_steps(life, 1)
    time.sleep(dice.uniform(0.0, 0.3))  # the moment is what is random here
    if way == "rank":
        life.kill([dice.randrange(WORLD)])
    elif way == "ranks":
        life.kill(range(WORLD))
    elif way == "sidecar":
        soak.sidecar.kill()
        time.sleep(dice.uniform(0.0, 0.05))
        life.kill(range(WORLD))
        soak.sidecar.start()
    elif way == "all with memory":
        soak.sidecar.kill()
        life.kill(range(WORLD))
        shutil.rmtree(soak.sidecar.memory)
        soak.sidecar.memory.mkdir()
        soak.sidecar.start()
    life.end()
    soak.learn(life)
    return way in ("rank", "ranks")


WAYS = ["rank", "rank", "ranks", "sidecar", "all with memory"]


def run_soak(soak, kills):
    before, survived, done = None, False, dict.fromkeys(WAYS, 0)
    for _ in range(kills):
        started = time.monotonic()
        with soak.living() as life:
            soak.until_steps(life, 1)
            soak.restarts_s.append(time.monotonic() - started)
            soak.check_life(life, all_kept=survived, before=before)
            way = soak.random.choice(WAYS)
            survived = kill_one_way(soak, life, way)
            done[way] += 1
        soak.check_volume()
        before = life
    assert soak.watermark >= 0, "nothing was ever committed"
    return done


@pytest.mark.timeout(300)
def test_twenty_kills_at_random_moments_break_no_promise(soak):
    run_soak(soak, 20)
    assert statistics.median(soak.lost_steps) <= 1
    assert max(soak.lost_steps) <= 2, "a restart in memory loses the step in flight, no more"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills(soak):
    done = run_soak(soak, 200)
    result = {
        "kills": done,
        "lives": soak.lives,
        "steps_trained": len(soak.expected),
        "restored_from": soak.tiers,
        "steps_lost_when_trainers_were_killed": {
            "median": statistics.median(soak.lost_steps),
            "max": max(soak.lost_steps),
        },
        "broken_invariants": 0,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def test_training_goes_on_while_the_sidecar_is_killed_again_and_again(soak):
    with soak.living() as life:
        soak.until_steps(life, 3)
        for _ in range(4):
            soak.sidecar.kill()
            soak.sidecar.start()
            count = len(life.steps(0))
            soak.until_steps(life, count + 5)
        assert all(process.is_alive() for process in life.processes)
        newest = eventually(
            lambda: soak.sidecar.get("/v1/status")["watermarks"].get("local"), within_s=20
        )
        behind = life.steps(0)[-1] - newest["step"]
        assert behind < 200
    soak.learn(life)
    assert soak.check_volume() > 0
