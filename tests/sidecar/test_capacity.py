"""A volume that cannot hold all that the policy keeps: steps keep flowing, the oldest go first."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer import FakeTrainer

from keepstep.wire.trainer import Flushed, StopSidecarRequest
from tests.harness import SidecarProcess, eventually
from tests.volume.drives import fill

MIB = 1 << 20
Sidecars = Callable[..., SidecarProcess]
Trainers = Callable[..., FakeTrainer]


def train(sidecar: SidecarProcess, trainer: FakeTrainer, steps: range) -> list[list[int]]:
    """Commit each of these steps. Returns what lay on the volume after each of them."""
    kept = []
    for step in steps:
        waited = trainer.wait(trainer.stage(step), "committed", flush=True)
        assert waited.reached, waited.reason
        kept.append(sidecar.published())
    return kept


def flows_and_lets_the_oldest_go(kept: list[list[int]], *, fit: int) -> None:
    """After each commit the newest steps lie there without a gap, as many as fit: each time the
    volume was full, one step went, and no more."""
    for step, held in enumerate(kept, start=1):
        assert held == list(range(step - len(held) + 1, step + 1)), kept
        assert len(held) == min(step, fit), kept


def test_steps_kept_by_interval_are_evicted_first_with_a_warning(
    sidecars: Sidecars, trainers: Trainers
) -> None:
    limits = ("--keep", "2", "--keep-every", "2", "--capacity", str(5 * MIB + MIB // 2))
    sidecar = sidecars().start(*limits)
    trainer = trainers(sidecar.socket, size=MIB).begin_run()
    train(sidecar, trainer, range(1, 7))
    eventually(lambda: sidecar.published() == [2, 4, 5, 6])
    assert sidecar.get("/v1/status")["warnings"] == []
    train(sidecar, trainer, range(7, 11))
    eventually(lambda: sidecar.published() == [4, 6, 8, 9, 10])
    (warning,) = sidecar.get("/v1/status")["warnings"]
    assert "the newest 2 and one every 2 steps" in warning


def test_two_ranks_without_space_at_the_same_time_evict_only_what_is_needed(
    sidecars: Sidecars, trainers: Trainers
) -> None:
    """Each on a volume of its own, full at the same time: one step makes room on both."""
    sidecar = sidecars()
    second = sidecar.volume.with_name("second")
    sidecar.start("--keep", "10", "--capacity", str(4 * MIB + MIB // 2), "--volume", str(second))
    ranks = [
        trainers(sidecar.socket, rank, 2, size=MIB).begin_run(local_world=2) for rank in range(2)
    ]
    for step in range(1, 9):
        ids = [rank.stage(step) for rank in ranks]
        for rank, step_id in zip(ranks, ids, strict=True):
            assert rank.wait(step_id, "committed", flush=True).reached
        assert sidecar.get("/v1/status")["evicted"] == max(0, step - 4)
    assert sidecar.published() == [5, 6, 7, 8]


@pytest.fixture
def small_drive(sidecars: Sidecars, tmp_path: Path) -> Iterator[SidecarProcess]:
    """A sidecar (not started) whose volume is an ext4 of 24 MiB on a loop device."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4 to make a small drive")
    process, image = sidecars(), tmp_path / "image"
    process.volume.mkdir()
    with image.open("wb") as file:
        file.truncate(24 * MIB)
    made = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", str(image)]
    subprocess.run(made, check=True, capture_output=True, timeout=30)
    mount = ["mount", "-o", "loop", str(image), str(process.volume)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    yield process
    process.end()
    subprocess.run(["umount", "--lazy", str(process.volume)], check=True, timeout=30)


def filled(volume: Path) -> Path:
    """Somebody else's file takes all the space. Returns it."""
    filler = volume / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        fill(file)
    return filler


@pytest.mark.root
def test_a_step_that_did_not_fit_is_written_at_the_end_if_space_was_freed(
    small_drive: SidecarProcess, trainers: Trainers
) -> None:
    """Somebody else has filled the drive, and it is cleaned up before `keepstep stop`."""
    sidecar = small_drive.start("--slots", "3")
    trainer = trainers(sidecar.socket, size=MIB).begin_run()
    filler = filled(sidecar.volume)
    for step in (1, 2):
        waited = trainer.wait(trainer.stage(step), "durable", flush=True)
        assert "no space" in waited.reason
    trainer.disconnect()
    filler.unlink()
    flushed = trainer.call("/v1/stop", StopSidecarRequest(), Flushed)
    assert [step_id.step for step_id in flushed.steps] == [1, 2]
    assert sidecar.published() == [1, 2]


@pytest.mark.root
def test_a_step_that_does_not_fit_at_the_end_stays_in_memory_for_the_next_sidecar(
    small_drive: SidecarProcess, trainers: Trainers
) -> None:
    sidecar = small_drive.start()
    trainer = trainers(sidecar.socket, size=MIB).begin_run()
    filler = filled(sidecar.volume)
    trainer.stage(1)
    trainer.disconnect()
    assert "no space" in trainer.call("/v1/stop", StopSidecarRequest(), Flushed).reason
    assert sidecar.process is not None
    assert sidecar.process.wait(20) == 0
    assert sidecar.slots(0)
    filler.unlink()
    sidecar.start()
    assert [
        step_id.step for step_id in trainer.call("/v1/stop", StopSidecarRequest(), Flushed).steps
    ] == [1]
    assert sidecar.process.wait(20) == 0
    assert sidecar.published() == [1]
    assert not sidecar.memory.exists()


@pytest.mark.root
def test_a_full_drive_deletes_the_oldest_steps_and_keeps_accepting_new_ones(
    small_drive: SidecarProcess, trainers: Trainers
) -> None:
    """No capacity is set: the file system itself has no more."""
    sidecar = small_drive.start("--keep", "100")
    trainer = trainers(sidecar.socket, size=4 * MIB).begin_run()
    kept = train(sidecar, trainer, range(1, 13))
    most = max(map(len, kept))
    assert 3 <= most <= 5, "of 4 MiB each"
    flows_and_lets_the_oldest_go(kept, fit=most)
    assert sidecar.get("/v1/status")["evicted"] == 12 - most
