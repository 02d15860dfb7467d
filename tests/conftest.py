"""Fixtures of all tests: a real sidecar on memory and a volume of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import warm
from tests.harness import SidecarProcess
from tests.volume.drives import command

warm.begin()  # before xdist starts its workers


def pytest_configure(config: pytest.Config) -> None:
    """The workers of xdist are forked, too: each would import torch for as long as tests take.
    Those of the end-to-end tests need no torch."""
    if str(config.getoption("markexpr")).startswith("e2e"):
        return
    if not hasattr(config, "workerinput") and "popen" in (config.getoption("tx", None) or ()):
        config.option.tx = [f"popen//python={warm.python()}" for _ in config.option.tx]


# a busy machine is no failure: what a step of a test may take is not what it tests
settings.register_profile("keepstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("keepstep")


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory in shared memory, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def sidecars(memory_dir: Path, tmp_path: Path) -> Iterator[Callable[..., SidecarProcess]]:
    """Makes sidecars (not started) that share one memory and one volume; ends them all."""
    made: list[SidecarProcess] = []

    def make(run: str = "run", *, memory: Path | None = None) -> SidecarProcess:
        one = SidecarProcess(run, memory or memory_dir, tmp_path / "volume", tmp_path / "log")
        made.append(one)
        return one

    yield make
    for one in made:
        one.end()


@pytest.fixture
def sidecar(
    sidecars: Callable[..., SidecarProcess], monkeypatch: pytest.MonkeyPatch
) -> SidecarProcess:
    """A running sidecar; KEEPSTEP_SOCKET names it."""
    one = sidecars().start()
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(one.socket))
    return one


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts things below the test's directory; skips where that is not allowed."""
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
