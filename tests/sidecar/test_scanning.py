"""A scan takes a while, and the machine does not stand still meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from node_hosts import make_node_host, write
from trainer import FakeTrainer

from keepstep.errors import DigestError, StorageError
from keepstep.steps import EpochId, StepId, TierAnswer
from keepstep_sidecar.cli import probe
from keepstep_sidecar.commit.node_host import NodeHost
from keepstep_sidecar.memory.slot_directories import SlotDirectories
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.volume import run_tree as scan_module
from keepstep_sidecar.volume import volume as volume_module
from keepstep_sidecar.volume.files import Filesystem
from keepstep_sidecar.volume.run_tree import VolumeScan, temporary_name
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import SidecarProcess, eventually
from tests.volume.images import EPOCH, RUN, make_layout, staged

Trainers = Callable[..., FakeTrainer]


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[VolumeSet]:
    made = VolumeSet([Volume(tmp_path / "volume" / RUN, run=RUN)])
    yield made
    made.close()


@pytest.fixture
def node_host(volumes: VolumeSet, tmp_path: Path) -> Iterator[NodeHost]:
    (tmp_path / "memory").mkdir()
    with ThreadPoolExecutor(1) as threads:
        yield make_node_host(
            volumes, SlotPool(SlotDirectories(tmp_path / "memory"), run=RUN), threads
        )


class Held:
    """A survey that has looked, and does not tell yet."""

    def __init__(self, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scanned, self.release = threading.Event(), threading.Event()
        self._scan = volumes.scan
        monkeypatch.setattr(volumes, "scan", self)

    def __call__(self) -> VolumeScan:
        found = self._scan()
        self.scanned.set()
        assert self.release.wait(20)
        return found


def forget_one(node_host: NodeHost) -> None:
    node_host.local_shards.forget_step(min(node_host.local_shards.shards))


@pytest.mark.parametrize(
    ("meanwhile", "left"), [(lambda root: write(root, 3), [1, 2, 3]), (forget_one, [2])]
)
async def test_changes_during_a_scan_are_not_undone_by_its_result(
    node_host: NodeHost,
    volumes: VolumeSet,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[NodeHost], None],
    left: list[int],
) -> None:
    write(node_host, 1)
    write(node_host, 2)
    held = Held(volumes, monkeypatch)
    scan = asyncio.ensure_future(node_host.scan_volumes())
    await asyncio.to_thread(held.scanned.wait, 20)
    meanwhile(node_host)
    held.release.set()
    await scan
    assert sorted(step_id.step for step_id in node_host.local_shards.shards) == left


async def test_a_volume_that_is_readable_again_is_no_longer_reported_as_unreadable(
    node_host: NodeHost, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> VolumeScan:
        raise StorageError("Input/output error")

    write(node_host, 1)
    with monkeypatch.context() as broken:
        broken.setattr(volumes, "scan", failing)
        await node_host.scan_volumes()
    assert "Input/output" in node_host.local_shards.unreadable
    await node_host.scan_volumes()
    assert node_host.local_shards.unreadable == ""
    assert [step_id.step for step_id in node_host.local_shards.shards] == [1]


async def test_a_shard_of_a_rank_outside_its_world_is_quarantined(
    node_host: NodeHost, volumes: VolumeSet
) -> None:
    """Sealed and whole: but what is known of a step is a bit for each rank up to the last."""
    write(node_host, 1)
    rank = (1 << 31) - 2
    forged = staged(make_layout(rank=rank, world=rank + 1), 1)
    volumes.write(forged.view, forged.layout, forged.control)
    await node_host.scan_volumes()
    assert node_host.copies.list_ranks_ever_held() == [0]
    assert volumes.volumes[0].count_quarantined_files() == 1


async def test_a_bad_block_in_one_shard_hides_no_other(
    node_host: NodeHost, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive cannot read its header any more."""

    def read(fd: int, path: Path, **_: object) -> object:
        if "000000002" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(fd, path, run=RUN)

    sound = scan_module.read_manifest
    for number in (1, 2, 3):
        write(node_host, number)
    monkeypatch.setattr(scan_module, "read_manifest", read)
    await node_host.scan_volumes()
    assert node_host.local_shards.scan_failed == ""
    assert sorted(step_id.step for step_id in node_host.local_shards.shards) == [1, 3]
    assert volumes.volumes[0].count_quarantined_files() == 1


@pytest.mark.parametrize(
    "stranger",
    [
        StepId(EpochId(9, "00000009"), 1),
        f"pending/{StepId(EpochId(9, '00000009'), 1)}",
        "retired/notes.txt",
    ],
    ids=str,
)
async def test_a_file_where_a_directory_belongs_hides_no_shard(
    node_host: NodeHost, volumes: VolumeSet, stranger: StepId | str
) -> None:
    write(node_host, 1)
    path = volumes.volumes[0].root / str(stranger)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    await node_host.scan_volumes()
    assert (node_host.local_shards.scan_failed, node_host.local_shards.unreadable) == ("", "")
    assert [step_id.step for step_id in node_host.local_shards.shards] == [1]
    assert path.exists()


async def test_a_volume_that_became_read_only_is_still_scanned(
    node_host: NodeHost, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 goes on read-only after an error, and what was being written lies there."""

    def refuse(self: Filesystem, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    write(node_host, 1)
    shard = next(volumes.volumes[0].root.glob("pending/*/rank-*"))
    left = shard.with_name(temporary_name(shard.name, pid=1, number=1))
    left.touch()
    monkeypatch.setattr(Filesystem, "unlink", refuse)
    await node_host.scan_volumes()
    assert node_host.local_shards.scan_failed == ""
    assert [step_id.step for step_id in node_host.local_shards.shards] == [1]


async def test_an_unreadable_volume_does_not_hide_shards_on_other_volumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a node's drives is dead when the sidecar starts; later it dies while it is there."""

    def survey(root: Path, *, run: str, filesystem: Filesystem) -> VolumeScan:
        if root in dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(root, run=run, filesystem=filesystem)

    def quarantined(volume: Volume) -> int:
        if volume.root in dead:
            raise StorageError("Input/output error")
        return 0

    sound, dead = scan_module.scan_shards, set[Path]()
    monkeypatch.setattr(volume_module, "scan_shards", survey)
    monkeypatch.setattr(Volume, "count_quarantined_files", quarantined)
    drives = VolumeSet([Volume(tmp_path / name / RUN, run=RUN) for name in ("a", "b")])
    (tmp_path / "memory").mkdir()
    with ThreadPoolExecutor(1) as threads:
        pool = SlotPool(SlotDirectories(tmp_path / "memory"), run=RUN)
        before = make_node_host(drives, pool, threads)
        for rank in (0, 1):
            write(before, 1, rank=rank, world=2)
        assert len({drives.volume_of(shard.path) for shard in before.local_shards.all()}) == 2
        node_host = make_node_host(drives, pool, threads)
        dead.add(drives.volume_for(1).root)
        await node_host.scan_volumes()
        assert node_host.copies.list_ranks_ever_held() == [0]
        assert "Input/output" in node_host.local_shards.unreadable, (
            "nobody says that rank 1 has nothing"
        )
        dead.clear()
        await node_host.scan_volumes()
        assert (node_host.copies.list_ranks_ever_held(), node_host.local_shards.scan_failed) == (
            [0, 1],
            "",
        )
        dead.add(drives.volume_for(0).root)
        await node_host.scan_volumes()
        assert node_host.copies.list_ranks_ever_held() == [0, 1], (
            "nothing is taken from what is known"
        )
        assert "Input/output" in node_host.local_shards.scan_failed
    drives.close()


@pytest.mark.parametrize("error", [StorageError("Input/output error"), MemoryError()], ids=repr)
async def test_a_failed_scan_removes_only_damaged_shards_from_the_known_ones(
    node_host: NodeHost, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing() -> VolumeScan:
        raise error

    write(node_host, 1)
    write(node_host, 2)
    monkeypatch.setattr(volumes, "scan", failing)
    (damaged,) = node_host.copies.sources_of_shard(StepId(EPOCH.id, 2), 0)
    await node_host.reject_copy(damaged, DigestError("chunk 0 is damaged"))
    assert (str(error) or "MemoryError") in node_host.local_shards.scan_failed
    assert node_host.local_shards.in_doubt, "nobody says that there is nothing, and it is repeated"
    assert [step_id.step for step_id in node_host.local_shards.shards] == [1]


# --- the process: files that are none, scans that fail ----------------------------------------


@pytest.fixture
def hostile(sidecars: Callable[..., SidecarProcess], trainers: Trainers) -> SidecarProcess:
    """A sidecar, not running, whose volume has a committed step 4 that is nowhere in memory."""
    sidecar = sidecars().start()
    trainer = trainers(sidecar.socket).begin_run()
    assert trainer.wait(trainer.stage(4), "committed", flush=True).reached
    sidecar.kill()
    sidecar.lose_memory()
    return sidecar


def test_files_that_are_not_shards_never_hide_valid_shards(
    hostile: SidecarProcess, trainers: Trainers
) -> None:
    shard = next(hostile.root.glob("0*/rank-*"))
    for number, plant in enumerate((os.mkfifo, Path.mkdir, Path.touch)):
        path = hostile.root / str(StepId(EpochId(9, "00000009"), number)) / shard.name
        path.parent.mkdir()
        plant(path)
    linked = hostile.root / str(StepId(EpochId(9, "00000009"), 7))
    linked.symlink_to(shard.parent)
    hostile.start()
    trainer = trainers(hostile.socket)
    trainer.connect()
    assert [candidate.id.step for candidate in trainer.candidates().candidates] == [4]
    assert shard.exists()


def test_a_failed_scan_is_reported_and_repeated_until_it_succeeds(
    hostile: SidecarProcess, trainers: Trainers
) -> None:
    step = next(hostile.root.glob("0*"))
    aside = hostile.volume / "aside"
    step.rename(aside)
    (hostile.root / "pending").rmdir()
    (hostile.root / "pending").symlink_to("elsewhere")  # it is unknown what lies there
    hostile.start()
    healthy = [*hostile.program, "probe", "--healthy", "--memory-dir", str(hostile.memory)]
    done = subprocess.run(healthy, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "a link or a file, where a directory belongs: move it away" in done.stderr
    assert probe.is_answering(hostile.socket), "it lives"
    trainer = trainers(hostile.socket)
    trainer.connect()
    assert trainer.candidates().answer is TierAnswer.UNKNOWN
    aside.rename(step)
    (hostile.root / "pending").unlink()
    eventually(lambda: probe.sidecar_health(hostile.socket) == "", what="the next scan")
    assert [candidate.id.step for candidate in trainer.candidates().candidates] == [4]
    done = subprocess.run(healthy, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n")


async def test_a_vote_does_not_report_an_empty_volume_before_damaged_shards_were_checked(
    node_host: NodeHost, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []

    def scan() -> VolumeScan:
        reasons.append(node_host.local_shards.unreadable)
        return VolumeScan()

    write(node_host, 2)
    monkeypatch.setattr(volumes, "scan", scan)
    (damaged,) = node_host.copies.sources_of_shard(StepId(EPOCH.id, 2), 0)
    await node_host.reject_copy(damaged, DigestError("chunk 0 is damaged"))
    assert len(reasons) == 1
    assert "is damaged" in reasons[0]
