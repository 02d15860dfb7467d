"""Fixtures of all tests: a real sidecar with its own memory and volume."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import warm
from tests.harness import SidecarProcess
from tests.volume.drives import command

if TYPE_CHECKING:
    from tests.cli.conftest import Keepstep

warm.begin()  # before xdist starts its workers


def pytest_configure(config: pytest.Config) -> None:
    """Fork xdist's workers from a warm process, too: otherwise each spends as much time importing
    torch as tests take. Workers of the end-to-end tests need no torch."""
    if str(config.getoption("markexpr")).startswith("e2e"):
        return
    if not hasattr(config, "workerinput") and "popen" in (config.getoption("tx", None) or ()):
        config.option.tx = [f"popen//python={warm.python()}" for _ in config.option.tx]


# no deadline: a slow machine must not fail a test, because no test checks how long an example takes
settings.register_profile("keepstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("keepstep")


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory in shared memory, which is removed after the test."""
    path = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def sidecars(memory_dir: Path, tmp_path: Path) -> Iterator[Callable[..., SidecarProcess]]:
    """Makes sidecars, not yet started, that share one memory and one volume. Ends them all."""
    made: list[SidecarProcess] = []

    def make(run: str = "run", *, memory: Path | None = None) -> SidecarProcess:
        process = SidecarProcess(run, memory or memory_dir, tmp_path / "volume", tmp_path / "log")
        made.append(process)
        return process

    yield make
    for process in made:
        process.end()


@pytest.fixture
def sidecar(
    sidecars: Callable[..., SidecarProcess], monkeypatch: pytest.MonkeyPatch
) -> SidecarProcess:
    """A running sidecar, whose socket is in KEEPSTEP_SOCKET."""
    process = sidecars().start()
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(process.socket))
    return process


@pytest.fixture
def keepstep(tmp_path: Path) -> Iterator[Keepstep]:
    """The command, in a directory of the test's own."""
    from tests.cli.conftest import Keepstep

    made = Keepstep(tmp_path)
    yield made
    made.end()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts file systems below the test's directory. Skips the test if that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small drive")
    points: list[Path] = []

    def mount(name: str, *words: str | Path) -> Path:
        point = tmp_path / name
        point.mkdir()
        try:
            command("mount", *words, point)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot mount here: {error.stderr.decode().strip()}")
        points.append(point)
        return point

    yield mount
    for point in reversed(points):
        command("umount", "--lazy", point)
