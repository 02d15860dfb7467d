"""A sidecar that is killed, and one that starts: what was sealed or durable is found again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer import FakeTrainer, content, lose_memory_and_damage, read_image

from keepstep.errors import SidecarError
from keepstep.image import PAGE_BYTES
from keepstep.steps import StepId, TierAnswer
from keepstep.wire.trainer import LeaseRequest, to_json
from keepstep_sidecar.volume.files import FAULTS_ENV
from tests.harness import SidecarProcess, eventually
from tests.volume.drives import die, small_drive

Trainers = Callable[..., FakeTrainer]


def both(sidecar: SidecarProcess, trainers: Trainers) -> list[FakeTrainer]:
    return [trainers(sidecar.socket, rank, 2).begin_run() for rank in range(2)]


def test_a_damaged_shard_is_quarantined_and_never_a_silent_fresh_start(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, memory_dir: Path
) -> None:
    sidecar = sidecars().start()
    trainer = trainers(sidecar.socket).begin_run()
    step_id = trainer.stage(4)
    assert trainer.wait(step_id, "committed").reached
    sidecar.kill()
    lose_memory_and_damage(sidecar.root, memory_dir, trainer.layout)
    sidecar.start()
    successor = trainers(sidecar.socket)
    successor.connect()
    found = successor.candidates()
    if found.answer is TierAnswer.STEPS:  # asked before the prefetch found out
        with pytest.raises(SidecarError) as error:
            successor.open(step_id)
        # the latter when the prefetch found out in between; both mean: vote again without it
        assert error.value.code in ("not-verified", "unknown-step")

    def is_quarantined() -> bool:
        found = successor.candidates()
        assert found.answer is TierAnswer.UNKNOWN  # also while the volumes are scanned
        return "quarantine" in found.reason

    eventually(is_quarantined)
    assert list((sidecar.root / "quarantine").iterdir())


def test_a_failed_write_is_reported_at_once_and_the_next_step_is_written(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start(**{FAULTS_ENV: "write.control:eio"})
    trainer = trainers(sidecar.socket).begin_run()
    waited = trainer.wait(trainer.stage(1), "committed", timeout_s=30.0, flush=True)
    assert not waited.reached
    assert "Input/output error" in waited.reason
    assert trainer.wait(trainer.stage(2), "committed", flush=True).reached


@pytest.mark.root
def test_a_failing_drive_loses_only_the_step_that_was_being_written(
    sidecars: Callable[..., SidecarProcess],
    trainers: Trainers,
    mounted: Callable[..., Path],
    tmp_path: Path,
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=320 << 20, kind="xfs")
    sidecar = sidecars().start("--volume", str(drive))
    ranks = both(sidecar, trainers)

    def commits(step: int) -> bool:
        ids = [rank.stage(step) for rank in ranks]
        return all(
            rank.wait(step_id, "committed", flush=True).reached
            for rank, step_id in zip(ranks, ids, strict=True)
        )

    assert commits(1)
    assert commits(2)
    (drive / sidecar.run / "quarantine").mkdir()
    die(drive)
    commits(3)  # or not
    assert all(map(commits, range(4, 9)))
    eventually(lambda: sidecar.published()[-2:] == [7, 8], what="readers see them")
    eventually(lambda: 5 not in sidecar.published(), what="retention goes on")
    status = sidecar.get("/v1/status")
    assert [bool(volume["failed"]) for volume in status["volumes"]] == [False, True]
    assert any("Input/output error" in warning for warning in status["warnings"])


def test_a_trainer_that_disconnects_while_its_lease_is_created_does_not_hold_the_rank(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    body = to_json(LeaseRequest(rank=0, world=1, attempt="a", pid=1, library="test"))
    head = f"POST /v1/lease HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as impatient:
            impatient.connect(str(sidecar.socket))
            impatient.sendall(head.encode() + body)
    trainers(sidecar.socket).begin_run()


@pytest.mark.parametrize(("options", "durable"), [((), {6}), (("--slots", "3"), {5, 6})])
def test_sigterm_makes_the_newest_steps_in_memory_durable(
    sidecars: Callable[..., SidecarProcess],
    trainers: Trainers,
    options: tuple[str, ...],
    durable: set[int],
) -> None:
    sidecar = sidecars().start("--persist-every", "1000000", *options)
    trainer = trainers(sidecar.socket).begin_run()
    for step in range(1, 7):
        trainer.stage(step)
    assert sidecar.terminate() == 0
    assert {StepId.parse(path.name).step for path in sidecar.root.glob("0*")} == durable
    assert not sidecar.socket.exists()
    assert list(sidecar.memory.glob("rank-*/*.slot")), "memory stays for a successor"


def test_a_sidecar_without_a_trainer_exits_after_its_linger_time(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--linger", "3")
    trainer = trainers(sidecar.socket).begin_run()
    step_id = trainer.stage(1)
    trainer.disconnect()
    assert sidecar.process is not None
    assert sidecar.process.wait(20) == 0
    assert (sidecar.root / str(step_id)).is_dir()
    assert not sidecar.memory.exists()


def test_a_sidecar_still_accepts_trainers_while_it_archives_its_last_step(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"  # not mounted yet
    options = ("--archive", str(archive), "--archive-every", "1", "--persist-every", "1")
    sidecar = sidecars().start("--linger", "3", *options)
    trainer = trainers(sidecar.socket).begin_run()
    trainer.stage(1)
    trainer.disconnect()
    eventually(lambda: "sidecar.linger_expired" in sidecar.text())
    trainer.connect()
    archive.mkdir()
    eventually(lambda: "sidecar.stop_cancelled" in sidecar.text())
    trainer.register()
    trainer.slot = None
    step_id = trainer.stage(2)
    assert not trainer.ended
    trainer.disconnect()
    assert sidecar.process is not None
    assert sidecar.process.wait(20) == 0
    assert (sidecar.root / str(step_id)).is_dir()
    assert not sidecar.memory.exists()


def test_two_sidecars_cannot_own_one_memory_directory(
    sidecar: SidecarProcess, tmp_path: Path
) -> None:
    assert sidecar.process is not None
    command = [sys.executable, "-m", "keepstep_sidecar", "--run", "other"]
    command += ["--memory-dir", str(sidecar.memory), "--volume", str(tmp_path / "other")]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 1
    assert f"running (pid {sidecar.process.pid})" in second.stderr
    assert sidecar.get("/v1/status")["run"] == "run"


def test_a_restore_gets_a_slot_although_all_found_ones_are_given_up(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    """A straggler might still write to them. The next sidecar reads the step before the trainer
    comes, and waits for one of them."""
    sidecar = sidecars().start("--slots", "8")
    trainer = trainers(sidecar.socket).begin_run()
    step_id = trainer.stage(1)
    assert trainer.wait(step_id, "committed").reached
    eventually(lambda: len(sidecar.slots(0)) == 8, what="all slots")
    trainer.disconnect()
    sidecar.kill()
    for path in sidecar.slots(0):
        with path.open("r+b") as file:
            file.seek(-PAGE_BYTES, os.SEEK_END)
            file.write(bytes(PAGE_BYTES))  # no image is left
    sidecar.start("--slots", "8")
    time.sleep(1.0)  # it waits for a slot by then; an earlier trainer would not show the error
    successor = trainers(sidecar.socket)
    successor.connect()
    assert [candidate.id for candidate in successor.candidates().candidates] == [step_id]
    opened = successor.open(step_id)
    assert read_image(trainer.layout, opened.path) == content(trainer.layout, 1)
