"""Trainers that speak the protocol without torch; the sidecar is the real process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importmode=importlib leaves it out

from machines import Machine, Run
from operator_host import Identity, OperatorHost, make_identity
from pods import Pod
from trainer import FakeTrainer

from tests.harness import free_port


@pytest.fixture
def trainers() -> Iterator[Callable[..., FakeTrainer]]:
    """Makes trainers, not yet connected; closes their leases at the end."""
    made: list[FakeTrainer] = []

    def make(path: Path, rank: int = 0, world: int = 1, *, size: int = 64 << 10) -> FakeTrainer:
        made.append(FakeTrainer(path, rank, world, size=size))
        return made[-1]

    yield make
    for process in made:
        process.disconnect()


@pytest.fixture
def run(
    tmp_path: Path, memory_dir: Path, trainers: Callable[..., FakeTrainer]
) -> Iterator[Callable[[int], Run]]:
    """Makes a run of some machines (not started); kills their sidecars at the end."""
    made: list[Machine] = []

    def make(nodes: int) -> Run:
        leader = f"127.0.0.1:{free_port()}"
        for rank in range(nodes):
            name = str(len(made))
            places = {"memory": memory_dir / name, "home": tmp_path / name}
            made.append(Machine(rank, **places, leader=leader))
        return Run(made[-nodes:], trainers)

    yield make
    for process in made:
        process.end()


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return make_identity(tmp_path / "tls")


@pytest.fixture
def operators(identity: Identity) -> Iterator[Callable[..., OperatorHost]]:
    """Makes operators of a run with two ranks (not started); ends them all."""
    made: list[OperatorHost] = []

    def make(*, identity: Identity = identity, **options: Any) -> OperatorHost:
        made.append(OperatorHost(identity, **options))
        return made[-1]

    yield make
    for process in made:
        process.stop()


@pytest.fixture
def operator(operators: Callable[..., OperatorHost]) -> OperatorHost:
    return operators().start()


@pytest.fixture
def pods(
    tmp_path: Path,
    memory_dir: Path,
    identity: Identity,
    operators: Callable[..., OperatorHost],
) -> Iterator[Callable[..., list[Pod]]]:
    """Makes the two pods of a run, with those node ranks (not started); kills their sidecars at
    the end, before `operators` end."""
    made: list[Pod] = []
    leader = free_port()

    def make(url: str, nodes: tuple[int, int] = (0, 1)) -> list[Pod]:
        for node in nodes:
            places = {"memory": memory_dir / f"pod-{node}", "home": tmp_path / f"pod-{node}"}
            made.append(Pod(node, **places, url=url, ca=identity.pem, leader=leader))
        return made

    yield make
    for process in made:
        process.end()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "archive"
    path.mkdir()
    return path
