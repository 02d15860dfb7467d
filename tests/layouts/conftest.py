"""Runs all layouts once: two lives of real ranks, over a real sidecar for each layout and node."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import warm
from tests.harness import SidecarProcess, eventually, matching
from tests.layouts.matrix import WORLDS

SCRIPT = Path(__file__).parent / "layouts.py"


@dataclass(frozen=True)
class Lives:
    """What two lives of a world left behind."""

    directory: Path
    sidecars: dict[str, list[SidecarProcess]]


def _live(directory: Path, world: int, life: int) -> None:
    logs = [directory / f"log.{life}.{rank}" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
        environment |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world)}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(directory / f"compiled.{rank}")
        with log.open("wb") as out:
            words = [str(SCRIPT), str(directory), str(life)]
            ranks.append(warm.Process(words, stdout=out, env=environment))
    try:
        for rank in ranks:
            rank.wait(150)
    finally:
        for rank in ranks:
            rank.kill()
    if not all((directory / f"done.{life}.{rank}").exists() for rank in range(world)):
        pytest.fail(f"life {life}: " + "\n".join(log.read_text()[-3000:] for log in logs))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Both lives of all layouts of two ranks."""
    yield from _lives(2, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Both lives of all layouts of four ranks."""
    yield from _lives(4, tmp_path_factory)


@pytest.fixture
def lives(request: pytest.FixtureRequest, world: int) -> Lives:
    """Those of a world; made once."""
    found: Lives = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])
    return found


def _lives(world: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    directory = tmp_path_factory.mktemp(f"layouts-{world}")
    memory = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    sidecars: dict[str, list[SidecarProcess]] = {}
    try:
        for name, nodes in WORLDS[world].items():
            for node in range(nodes):
                place = directory / f"{name}.{node}"
                process = SidecarProcess(
                    name, memory / f"{name}.{node}", place, place.with_suffix(".log")
                )
                process.memory.mkdir()
                sidecars.setdefault(name, []).append(process.start())
                (directory / f"{name}.{node}.sock").symlink_to(process.socket)
        _live(directory, world, 1)
        # before another life retires it
        for name, those in sidecars.items():
            for process in those:
                # pending where nobody knows of the other node's ranks
                place = "*-000000001" if len(those) == 1 else "pending/*-000000001"
                eventually(lambda process=process, place=place: matching(process.root, place))
                [step] = matching(process.root, place)
                shutil.copytree(step, directory / "kept" / name, dirs_exist_ok=True)
        _live(directory, world, 2)
        yield Lives(directory, sidecars)
    finally:
        for process in (process for those in sidecars.values() for process in those):
            process.end()
        shutil.rmtree(memory, ignore_errors=True)
