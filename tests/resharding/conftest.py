"""Lives of ranks: see rank.py."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests import warm

RANK = Path(__file__).parent / "rank.py"


class Run:
    """One run: lives of changing worlds and layouts on one sidecar."""

    def __init__(self, sidecar, directory: Path, *, seed: int, uniform: bool):
        self._sidecar, self._directory = sidecar, directory
        self._common = {"seed": seed, "uniform": uniform}
        self._lives = 0

    def _live(self, action: str, layout: str, world: int, **more) -> list:
        self._lives += 1
        store = str(self._directory / f"store-{self._lives}")
        order = {"action": action, "layout": layout, "world": world, "store": store, **more}
        order |= {**self._common, "socket": str(self._sidecar.socket)}
        log, words = Path(f"{store}.log"), [str(RANK), json.dumps(order)]
        with log.open("ab") as out:
            ranks = [warm.Process([*words, str(rank)], stdout=out) for rank in range(world)]
        codes = [rank.wait(100) for rank in ranks]
        if "die" in more:
            assert codes[more["die"]] == -signal.SIGKILL
        outputs = [Path(f"{store}.{rank}") for rank in range(world) if rank != more.get("die")]
        answers = [
            json.loads(path.read_text()) if path.exists() else {"crash": ""} for path in outputs
        ]
        crashes = [
            answer["crash"] for answer in answers if isinstance(answer, dict) and "crash" in answer
        ]
        assert not crashes, "\n".join(crashes) + log.read_text() + self._sidecar.text()[-3000:]
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
def run_of(sidecar, tmp_path):
    """Makes the run of a test, with its seed."""

    def make(seed: int = 1, *, uniform: bool = True) -> Run:
        print(f"seed {seed}")
        return Run(sidecar, tmp_path, seed=seed, uniform=uniform)

    return make
