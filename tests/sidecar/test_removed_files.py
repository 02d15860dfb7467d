"""Whoever trains can write in shared memory: nothing that it plants there reaches a volume."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer import FakeTrainer, come_back, content, read_image

from keepstep.errors import SidecarError
from keepstep.image import ControlPage
from keepstep.steps import StepId, Tier
from keepstep.wire.trainer import (
    FlushRequest,
    OpenedStep,
    RestoreStepRequest,
    Sources,
    SourcesRequest,
)
from keepstep_sidecar.memory.slot_directories import rank_directory
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]


def tree(root: Path) -> dict[str, bytes]:
    """Without what a sidecar writes there on its own."""
    own = (".lock", "history.jsonl")
    files = (path for path in root.rglob("*") if path.is_file() and path.name not in own)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def committed(sidecar: SidecarProcess, trainers: Trainers, *, steps: int = 1) -> FakeTrainer:
    """Steps 1 to `steps` are on the volume, and in memory; nobody trains any more."""
    trainer = trainers(sidecar.socket).begin_run()
    for step in range(1, steps + 1):
        assert trainer.wait(trainer.stage(step), "committed", flush=True).reached
    trainer.disconnect()
    return trainer


def newest_slot(sidecar: SidecarProcess, step: int) -> Path:
    for path in sidecar.memory.glob("rank-*/*.slot"):
        page = path.read_bytes()[-4096:]
        if page.strip(b"\0") and ControlPage.from_bytes(page).step == step:
            return path
    pytest.fail(f"step {step} is in no slot")


def test_a_sidecar_does_not_follow_links_in_shared_memory(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, tmp_path: Path
) -> None:
    sidecar = sidecars().start()
    layout = committed(sidecar, trainers).layout
    sidecar.kill()
    sidecar.lose_memory()
    shard = next(sidecar.root.glob("0*/rank-*"))
    for number in range(4):
        (sidecar.root / f"victim-{number}").write_bytes(b"precious" * 1024)
    (sidecar.root / "of-others").mkdir()
    (sidecar.root / "of-others" / "file").write_bytes(b"precious")
    before, memory = tree(sidecar.root), sidecar.memory
    (memory / "sidecar.json").symlink_to(sidecar.root / "victim-0")
    (memory / ".sidecar.json.new").symlink_to(sidecar.root / "victim-1")
    (memory / "sidecar.pid").symlink_to(sidecar.root / "victim-2")
    (memory / "sidecar.sock").symlink_to(sidecar.root / "victim-3")
    (memory / "window-00000-0").mkdir()
    rank_directory(memory, 0).symlink_to(sidecar.root / "of-others")
    rank_directory(memory, 1).mkdir()
    (rank_directory(memory, 1) / f"{layout.id[:12]}.0.slot").symlink_to(shard)
    (rank_directory(memory, 1) / f"{layout.id[:12]}.1.slot.new").symlink_to(shard)
    rank_directory(memory, 2).mkdir()
    os.mkfifo(rank_directory(memory, 2) / f"{layout.id[:12]}.0.slot")
    (memory / "rank-99999999999999999999").mkdir()
    sidecar.start()
    assert not sidecar.memory.joinpath("sidecar.json").is_symlink()
    assert {**before, **tree(sidecar.root)} == before == tree(sidecar.root)
    assert stat.S_IMODE((sidecar.root / "of-others").stat().st_mode) != 0o2770
    trainer = trainers(sidecar.socket)
    trainer.connect()
    assert [candidate.tier for candidate in trainer.candidates().candidates] == [Tier.LOCAL]
    trainer.go_on()
    assert trainer.wait(trainer.stage(2), "committed", flush=True).reached
    after = tree(sidecar.root)
    kept = before.keys() - {"run.json"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_a_file_with_a_second_hard_link_is_not_used_as_a_slot(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    """Where volume and memory are of one file system, a hard link is a link, too."""
    sidecar = sidecars().start()
    committed(sidecar, trainers)
    sidecar.kill()
    slot = newest_slot(sidecar, 1)
    os.link(slot, sidecar.memory / "kept")
    before = (sidecar.memory / "kept").read_bytes()
    sidecar.start()
    assert "it has 2 names" in sidecar.text()
    assert (sidecar.memory / "kept").read_bytes() == before


@pytest.mark.parametrize("damage", ["flipped", "zeroed", "header", "truncated", "removed"])
def test_a_slot_that_fails_verification_is_skipped_for_the_next_tier(
    sidecar: SidecarProcess, trainers: Trainers, damage: str
) -> None:
    layout = committed(sidecar, trainers, steps=2).layout
    damage_slot(newest_slot(sidecar, 2), damage)
    for _ in range(2):
        trainer = trainers(sidecar.socket)
        trainer.connect()
        newest = trainer.candidates().candidates[-1]
        assert newest.id.step == 2
        opened = trainer.open(newest.id)
        assert opened.tier is Tier.LOCAL
        assert read_image(layout, opened.path) == content(layout, 2)
        trainer.disconnect()


def damage_slot(path: Path, damage: str) -> None:
    if damage == "removed":
        path.unlink()
    elif damage == "truncated":
        os.truncate(path, 8192)
    else:
        at = 100 if damage == "header" else path.stat().st_size - 4096 + 100
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at if damage != "zeroed" else at - 100)
            file.write(bytes(4096) if damage == "zeroed" else bytes([byte ^ 1]))


def test_an_image_that_was_never_durable_and_is_damaged_is_not_offered(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--persist-every", "1000000", "--slots", "3")
    trainer = trainers(sidecar.socket).begin_run()
    ids = [trainer.stage(step) for step in (1, 2)]
    trainer.disconnect()
    damage_slot(newest_slot(sidecar, 2), "flipped")
    successor = trainers(sidecar.socket)
    successor.connect()
    assert [candidate.id for candidate in successor.candidates().candidates] == ids[:1]


def test_a_truncated_slot_is_dropped_without_crashing_the_sidecar(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--persist-every", "1000000", "--slots", "3")
    trainer = trainers(sidecar.socket).begin_run()
    ids = [trainer.stage(step) for step in (1, 2)]
    os.truncate(newest_slot(sidecar, 2), 4096)
    with contextlib.suppress(SidecarError):  # once it has looked, the lease is over
        assert trainer.wait(ids[0], "durable", flush=True).reached
        trainer.call("/v1/flush", FlushRequest(timeout_s=1.0), dict)
    eventually(lambda: '"slot.lost"' in sidecar.text(), what="the slot is given up")
    come_back(trainer)
    assert trainer.wait(trainer.stage(3), "committed", flush=True).reached
    assert sidecar.process is not None
    assert sidecar.process.poll() is None
    assert "quarantine" not in {path.name for path in sidecar.root.iterdir()}


def test_a_slot_that_a_trainer_reports_as_unusable_is_not_offered_again(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    """Such as one that was removed between the sidecar's look and its own."""
    committed(sidecar, trainers, steps=2)
    step_id = StepId(trainers(sidecar.socket).epoch.id, 2)
    trainer = trainers(sidecar.socket)
    trainer.connect()
    trainer.candidates()
    asked = SourcesRequest(lease=trainer.lease, id=step_id)
    path = trainer.call("/v1/sources", asked, Sources).sources[0].path
    first = trainer.open(step_id)
    assert (first.tier, first.path) == (Tier.MEMORY, path)
    again = RestoreStepRequest(lease=trainer.lease, id=step_id, bad=first.path)
    assert trainer.call("/v1/restore", again, OpenedStep).tier is Tier.LOCAL
    request = SourcesRequest(lease=trainer.lease, id=step_id, bad=(path,))
    found = trainer.call("/v1/sources", request, Sources).sources[0]
    assert found.path != path or found.tier is Tier.LOCAL


# --- removed under a sidecar that runs --------------------------------------------------------


def remove_at_once(directory: Path) -> None:
    """Remove a directory in which the sidecar may create files just now."""
    gone = directory.with_name(f"{directory.name}-gone")
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def test_the_next_step_is_kept_and_none_is_lost_after_the_shared_memory_was_removed(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--persist-every", "1000000")
    trainer = trainers(sidecar.socket).begin_run()
    ids = [trainer.stage(step) for step in range(1, 6)]
    eventually(lambda: len(list(sidecar.memory.glob("rank-*/*.slot"))) == 2, what="all slots")
    remove_at_once(sidecar.memory)
    come_back(trainer)
    assert trainer.candidates().candidates[-1].id == ids[-1], "it was made durable in time"
    path = trainer.begin()
    assert path.exists(), "a slot that others can open"
    assert trainer.wait(trainer.stage(6), "committed", flush=True).reached
    second = [*sidecar.program, "--run", "run", "--memory-dir", str(sidecar.memory)]
    second += ["--volume", str(sidecar.volume)]
    refused = subprocess.run(second, capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode == 1
    assert "running (pid" in refused.stderr


def test_all_slots_are_recreated_when_memory_is_removed_during_their_creation(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket, size=64 << 20).begin_run()
    trainer.take_slot()
    remove_at_once(sidecar.memory)
    come_back(trainer)
    eventually(lambda: len(list(sidecar.memory.glob("rank-*/*.slot"))) == 2, what="all slots")
    assert trainer.wait(trainer.stage(1), "committed", flush=True).reached


def test_when_the_run_is_removed_from_its_volume_the_next_step_is_kept(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    assert trainer.wait(trainer.stage(1), "committed", flush=True).reached
    remove_at_once(sidecar.root)
    eventually(lambda: (sidecar.root / "run.json").exists(), what="the run's directory")
    assert trainer.wait(trainer.stage(2), "committed", flush=True).reached
    assert sidecar.get("/v1/status")["volumes"][0]["failed"] == ""
    assert 2 in sidecar.published()
    sidecar.terminate()
    sidecar.start()
    successor = trainers(sidecar.socket)
    successor.connect()
    assert successor.candidates().highest_epoch == 1


@pytest.mark.parametrize("removed", ["files", "directory", "memory"])
def test_no_step_is_lost_when_a_trainer_asks_before_the_removal_of_its_memory_is_noticed(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, removed: str
) -> None:
    sidecar = sidecars().start("--persist-every", "1000000", "--slots", "3")
    trainer = trainers(sidecar.socket).begin_run()
    ids = [trainer.stage(step) for step in (1, 2, 3)]
    trainer.release()
    successor = trainers(sidecar.socket)
    successor.connect()
    if removed == "files":
        for path in sidecar.slots(0):
            path.unlink()
    else:
        remove_at_once(sidecar.memory if removed == "memory" else rank_directory(sidecar.memory, 0))
    eventually(sidecar.socket.exists, every_s=0.001)
    assert successor.candidates(timeout_s=30.0).candidates[-1].id == ids[-1]
    opened = successor.open(ids[-1])
    assert read_image(trainer.layout, opened.path) == content(trainer.layout, 3)
