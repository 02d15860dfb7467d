"""What many runs cost: bounded writes, bounded memory; stated by `load.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from keepstep_operator.reconcile.ratelimit import WRITES_A_SECOND
from tests.operator.reconcile.load import SECONDS

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
