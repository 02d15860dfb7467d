"""What many runs cost: bounded writes, bounded memory; stated by `load.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from keepstep_operator.reconcile.ratelimit import WRITES_A_SECOND
from tests.operator.reconcile.load import SECONDS, simulate

_ROOT = Path(__file__).parents[3]


def test_200_runs_of_2000_pods_fit_the_bars_of_memory_writes_and_cpu() -> None:
    command = [sys.executable, "-m", "tests.operator.reconcile.load", "200", "10", "1"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    cost = json.loads(done.stdout)
    print(cost)
    assert cost["peak_rss_mib"] <= 200
    assert cost["status_writes"] <= SECONDS * WRITES_A_SECOND + 200
    assert cost["events"] <= 200 * 2
    assert cost["cores"] <= 1.0


def test_writes_do_not_grow_with_the_ranks_of_a_run() -> None:
    few, many = simulate(1, 2, 1, seconds=30), simulate(1, 16, 4, seconds=30)
    assert few["status_writes"] <= 30 / 2 + 1
    assert many["status_writes"] <= 30 / 2 + 1


def test_thousands_of_ranks_in_one_run_report_less_often_and_leave_room_for_others() -> None:
    cost = simulate(1, 64, 8, seconds=20)
    print(cost)
    assert cost["cores"] <= 0.5
    assert cost["least_gap_s"] <= 30


def test_a_run_reports_as_often_as_its_pods_allow_however_many_ranks_they_have() -> None:
    """What a report costs besides follows the pods, which each reply names."""
    few, many = simulate(1, 64, 1, seconds=5), simulate(1, 64, 8, seconds=5)
    assert few["least_gap_s"] == many["least_gap_s"] <= 1.0
