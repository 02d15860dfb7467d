"""Goodput where people look: over a killed trainer, a killed sidecar, and after the run's end."""

from __future__ import annotations

import re

import pytest

from tests import warm
from tests.cli.conftest import TRAIN, Keepstep


def test_goodput_covers_all_restarts_and_is_shown_after_the_run_ended(keepstep: Keepstep) -> None:
    keepstep.script("train.py", TRAIN)
    command = ("--", warm.python(), "train.py")
    done = keepstep("run", "--restarts", "1", *command, "60", "30")
    last = done.stderr.splitlines()[-1]
    (share,) = re.findall(r"; goodput ([0-9.]+) % of [0-9.]+", last)
    answer = keepstep.json("status")["goodput"]
    assert answer["interruptions"] == 1
    assert answer["steps"] == 60
    assert abs(100 * answer["ratio"] - float(share)) < 0.06
    assert answer["wall_s"] == pytest.approx(sum(answer["seconds"].values()))
    assert answer["seconds"]["training_prep"] > 0
    shown = keepstep("status").stdout
    assert re.search(rf"goodput +{share} % of .* interrupted once; lost: .*[0-9]s", shown)
    keepstep("run", *command, "70", "-1")  # another sidecar
    again = keepstep.json("status")["goodput"]
    assert (again["interruptions"], again["steps"]) == (2, 70)
    assert again["wall_s"] > answer["wall_s"]
