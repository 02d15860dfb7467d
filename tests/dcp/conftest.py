"""Ranks as processes of their own, with gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import keepstep.dcp
from tests import warm

WORKER = Path(__file__).parent / "worker.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    """What a test began in this process ends with it."""
    yield
    keepstep.dcp.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a command of `worker.py` on `world` ranks; returns what each wrote to stderr.

    The first rank that fails ends the others. `killed`: a rank that must end by SIGKILL.
    `sockets`: of each rank's own sidecar, if they have different ones.
    """

    def run(
        world: int,
        *command: object,
        killed: int | None = None,
        sockets: Sequence[Path] = (),
        **environment: str,
    ) -> list[str]:
        name, *arguments = map(str, command)
        store = tmp_path / f"store-{time.monotonic_ns()}"
        logs = [tmp_path / f"{store.name}.{rank}" for rank in range(world)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        processes = []
        for rank, log in enumerate(logs):
            words = [name, str(rank), str(world), str(store), *arguments]
            if sockets:
                variables["KEEPSTEP_SOCKET"] = str(sockets[rank])
            with log.open("w") as out:
                processes.append(warm.Process([str(WORKER), *words], env=variables, stdout=out))
        codes = _wait(processes)
        outputs = [log.read_text() for log in logs]
        text = "\n".join(output[-3000:] for output in outputs)
        if killed is None:
            assert not any(codes), text
        else:
            assert codes[killed] == -signal.SIGKILL, text
        return outputs

    return run


def _wait(processes: list[warm.Process]) -> list[int]:
    """Exit codes; what still runs 5 s after one failed is killed."""
    deadline = time.monotonic() + 100
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.02)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]
