"""A Slurm for each test; it takes a second."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Two nodes, n1 and n2."""
    missing = [name for name in ("slurmctld", "munged", "nsenter", "ip") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    scratch = tmp_path / "slurm"
    with Slurm(scratch, nodes=("n1", "n2"), environment=environment) as cluster:
        yield cluster
