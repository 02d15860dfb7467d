"""Lives of ranks, forked from one process that has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ZYGOTE = Path(__file__).parent / "zygote.py"


class Zygote:
    """See `zygote.py`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("KEEPSTEP_SOCKET", None)
        self.process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def live(self, order: dict) -> list:
        """One life of all ranks; what each of them says."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(20)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    one = Zygote()
    yield one
    one.close()


class Run:
    """One run: lives of changing worlds and layouts on one sidecar."""

    def __init__(self, zygote: Zygote, sidecar, directory: Path, *, seed: int, uniform: bool):
        self._zygote, self._sidecar, self._directory = zygote, sidecar, directory
        self._common = {"seed": seed, "uniform": uniform}
        self._lives = 0

    def _live(self, action: str, layout: str, world: int, **more) -> list:
        self._lives += 1
        store = str(self._directory / f"store-{self._lives}")
        order = {"action": action, "layout": layout, "world": world, "store": store, **more}
        answers = self._zygote.live({**self._common, **order, "socket": str(self._sidecar.socket)})
        if "die" in more:
            assert "without an answer" in answers.pop(more["die"])["crash"]
        crashes = [one["crash"] for one in answers if isinstance(one, dict) and "crash" in one]
        assert not crashes, "\n".join(crashes) + self._sidecar.text()[-3000:]
        return answers

    def save(self, layout: str, world: int, **more) -> int:
        """The step that is kept: 7, or what `step` says, or a later one."""
        return self._live("save", layout, world, **more)[0]

    def restore(self, layout: str, world: int, **more) -> list:
        return self._live("restore", layout, world, **more)

    def lose_memory(self, *options: str) -> None:
        """What is left is on the volume. `options` for the next sidecar."""
        self._sidecar.kill()
        for slot in self._sidecar.memory.rglob("*"):
            if slot.is_file():
                slot.unlink()
        self._sidecar.start(*options)


@pytest.fixture
def run_of(zygote, sidecar, tmp_path):
    """Makes the run of a test, with its seed."""

    def make(seed: int = 1, *, uniform: bool = True) -> Run:
        print(f"seed {seed}")
        return Run(zygote, sidecar, tmp_path, seed=seed, uniform=uniform)

    return make
