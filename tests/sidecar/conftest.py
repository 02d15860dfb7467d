"""Trainers that speak the protocol without torch; the sidecar is the real process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importmode=importlib leaves it out

from trainer import FakeTrainer


@pytest.fixture
def trainers() -> Iterator[Callable[..., FakeTrainer]]:
    """Makes trainers, not yet connected; closes their leases at the end."""
    made: list[FakeTrainer] = []

    def make(path: Path, rank: int = 0, world: int = 1, *, size: int = 64 << 10) -> FakeTrainer:
        made.append(FakeTrainer(path, rank, world, size=size))
        return made[-1]

    yield make
    for one in made:
        one.disconnect()
