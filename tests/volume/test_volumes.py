"""Several volumes of one run, and the record of its epochs."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.errors import (
    DigestError,
    NoSpaceError,
    StorageError,
)
from keepstep.steps import Epoch, EpochId
from keepstep_sidecar.volume import run_record
from keepstep_sidecar.volume.files import Filesystem
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import flip
from tests.volume.images import EPOCH, RUN, Slot, empty_slot, load, make_layout, staged, step_id

WORLD = 3


@pytest.fixture
def volumes(open_volume: Callable[..., Volume]) -> VolumeSet:
    return VolumeSet([open_volume("one"), open_volume("two")])


def write_step(volumes: VolumeSet, step: int) -> list[Slot]:
    slots = [staged(make_layout(rank=rank, world=WORLD), step) for rank in range(WORLD)]
    for slot in slots:
        volumes.write(slot.view, slot.layout, slot.control)
    return slots


def test_ranks_are_spread_over_volumes_and_found_by_a_scan(volumes: VolumeSet) -> None:
    write_step(volumes, 1)
    homes = [shard.path.parents[2] for shard in volumes.scan().shards]
    path, two = (volume.root for volume in volumes.volumes)
    assert [home.parent if home.name == "pending" else home for home in homes] == [path, two, path]


def test_a_run_is_not_removed_as_long_as_a_volume_is_only_read(
    open_volume: Callable[..., Volume], tmp_path: Path
) -> None:
    unwritable = Volume(tmp_path / "unwritable" / RUN, run=RUN, read_only="for the test")
    volumes = VolumeSet([unwritable, open_volume("one")])
    shutil.rmtree(volumes.volumes[1].root)
    assert volumes.volumes[1].is_run_directory_removed()
    assert not volumes.is_run_directory_removed()
    assert volumes.repair_directories()


def test_any_set_of_ranks_is_spread_evenly_over_the_volumes(volumes: VolumeSet) -> None:
    assert sorted(volumes.home_volume(rank) for rank in (0, 2, 4, 6)) == [0, 0, 1, 1]
    assert volumes.home_volume(2) == volumes.home_volume(2)


def test_a_full_volume_is_skipped_until_it_has_space(open_volume: Callable[..., Volume]) -> None:
    slot = staged(make_layout(world=WORLD), 1)
    size = slot.layout.size_bytes
    full = open_volume("one", capacity_bytes=size + size // 2)
    volumes = VolumeSet([full, open_volume("two", capacity_bytes=size + size // 2)])
    for step, number in ((1, 0), (2, 1)):
        slot = staged(make_layout(world=WORLD), step)
        path = volumes.write(slot.view, slot.layout, slot.control).shard.path
        assert path.is_relative_to(volumes.volumes[number].root)
    slot = staged(make_layout(world=WORLD), 3)
    with pytest.raises(NoSpaceError, match=str(full.root)):
        volumes.write(slot.view, slot.layout, slot.control)
    full.delete_step(step_id(1))
    path = volumes.write(slot.view, slot.layout, slot.control).shard.path
    assert path.is_relative_to(full.root)
    assert not full.failed


def test_a_step_that_loses_a_shard_disappears_from_every_volume(volumes: VolumeSet) -> None:
    slots = write_step(volumes, 1)
    volumes.publish_step(step_id(1))
    broken = volumes.scan().shards[1].path
    flip(broken, slots[1].layout.extras_begin)
    with pytest.raises(DigestError):
        load(volumes, broken, empty_slot(slots[1].layout))
    assert [(s.rank, s.published) for s in volumes.scan().shards] == [(0, False), (2, False)]
    volumes.write(slots[1].view, slots[1].layout, slots[1].control)
    assert volumes.publish_step(step_id(1)) is not None
    assert [(s.rank, s.published) for s in volumes.scan().shards] == [(r, True) for r in range(3)]


def test_a_scan_that_quarantines_a_shard_hides_its_step_on_all_volumes(volumes: VolumeSet) -> None:
    slots = write_step(volumes, 1)
    volumes.publish_step(step_id(1))
    flip(volumes.scan().shards[1].path, slots[1].layout.size_bytes - 1)
    scan = volumes.scan()
    assert [(shard.rank, shard.published) for shard in scan.shards] == [(0, False), (2, False)]
    assert len(scan.problems) == 1


def test_a_rank_switches_to_another_volume_when_its_volume_has_failed(
    volumes: VolumeSet, armed: Callable[[str], None]
) -> None:
    volume, two = volumes.volumes
    slot = staged(make_layout(world=WORLD), 1)
    armed("write.data:eio")
    with pytest.raises(StorageError):
        volumes.write(slot.view, slot.layout, slot.control)
    assert volume.failed
    assert volumes.volume_for(0) is volumes.volume_for(1) is two
    two.failed = "too"
    assert volumes.volume_for(0) is volume, "with no healthy volume left, try one's own again"


def test_epochs_are_recorded_on_every_volume_and_merged(
    volumes: VolumeSet, armed: Callable[[str], None]
) -> None:
    later = Epoch(EpochId(2, "00000000"), step_id(4))
    armed("record.data:eio@3")
    volumes.change_record(lambda record: record.with_added_epochs(EPOCH))
    volumes.change_record(lambda record: record.with_added_epochs(later))
    volume, two = volumes.volumes
    assert (volume.record.epochs, two.record.epochs) == ((EPOCH,), (EPOCH, later))
    assert volumes.record.epochs == (EPOCH, later)
    assert run_record.load_run_record(two.root / "run.json", run=RUN) == two.record


def test_an_epoch_that_no_volume_can_record_is_an_error(
    volumes: VolumeSet, armed: Callable[[str], None]
) -> None:
    armed("record.data:eio@1,record.data:eio@2")
    with pytest.raises(StorageError):
        volumes.change_record(lambda record: record.with_added_epochs(EPOCH))


class Short(Filesystem):
    """Of what a process needs to read any file; `error` 0: of nothing."""

    error = 0

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().read_into(fd, into, offset)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFAULT])
def test_running_out_of_process_resources_does_not_quarantine_a_shard(
    open_volume: Callable[..., Volume], error: int
) -> None:
    filesystem = Short()
    volumes = VolumeSet([open_volume("one", filesystem=filesystem), open_volume("two")])
    (slot, *_) = write_step(volumes, 1)
    volumes.publish_step(step_id(1))
    found = volumes.scan().shards
    filesystem.error = error
    with pytest.raises(StorageError, match="cannot read it"):
        load(volumes, found[0].path, empty_slot(slot.layout))
    filesystem.error = 0
    assert volumes.scan().shards == found, "it is where it was, and readers see it"
    assert all(shard.published for shard in volumes.scan().shards)
    assert [volume.failed for volume in volumes.volumes] == ["", ""]
    load(volumes, found[0].path, empty_slot(slot.layout))
