"""Volumes on the real disk below pytest's temporary directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep_sidecar.volume import files
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import RUN


@pytest.fixture
def open_volume(tmp_path: Path) -> Iterator[Callable[..., Volume]]:
    """Opens volumes by name; closes them after the test."""
    opened: list[Volume] = []

    def open_one(name: str = "disk", **options: Any) -> Volume:
        volume = Volume(tmp_path / name / RUN, run=RUN, **options)
        opened.append(volume)
        return volume

    yield open_one
    for volume in opened:
        volume.close()


@pytest.fixture
def volume(open_volume: Callable[..., Volume]) -> Volume:
    return open_volume()


@pytest.fixture
def armed() -> Iterator[Callable[[str], None]]:
    """Arms faults by their text; disarms them after the test."""
    yield files.arm_faults
    files.arm_faults("")
