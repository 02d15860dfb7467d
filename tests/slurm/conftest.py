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
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    needed = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "ip")
    if missing := [name for name in needed if not shutil.which(name, path=path)]:
        pytest.skip(f"needs {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    scratch = tmp_path / "slurm"
    with Slurm(scratch, nodes=("n1", "n2"), environment=environment) as cluster:
        yield cluster
