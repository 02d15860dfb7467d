"""What a volume does when nothing fails: write, find, load, publish, retire."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.errors import ForeignError, NoSpaceError, StorageError, UsageError
from keepstep.steps import shard_name
from keepstep_sidecar.volume.files import IoMode, RateLimit
from keepstep_sidecar.volume.run_tree import scan_shards
from keepstep_sidecar.volume.volume import Volume, WrittenShard
from tests.harness import verify_image
from tests.volume.images import CHUNK, RUN, Slot, empty_slot, load, make_layout, staged, step_id

THREE_CHUNKS = 2_300_000
"""Parameters that make an image of two whole chunks and a part."""


def write(volume: Volume, slot: Slot) -> WrittenShard:
    return volume.write(slot.view, slot.layout, slot.control)


@pytest.mark.parametrize("engine", list(IoMode))
@pytest.mark.parametrize("parameters", [1, 6000, THREE_CHUNKS])
def test_a_written_shard_is_read_back_bit_equal(
    open_volume: Callable[..., Volume], engine: IoMode, parameters: int
) -> None:
    volume = open_volume(engine=engine)
    slot = staged(make_layout(parameters=parameters), 7)
    written = write(volume, slot)
    view = empty_slot(slot.layout)
    control = load(volume, written.shard.path, view)
    assert view[: slot.layout.digests_begin] == slot.view[: slot.layout.digests_begin]
    assert verify_image(view, slot.layout) == control
    assert replace(control, root=None, sections=None, written_at=None) == slot.control
    assert control.root == written.shard.root


def test_a_scan_recovers_all_properties_from_the_shards_alone(volume: Volume) -> None:
    slots = [staged(make_layout(rank=rank), step) for step in (2, 1) for rank in (1, 0)]
    written = {slot.control.step_id: write(volume, slot) for slot in slots}
    volume.publish_step(step_id(1))
    scan = volume.scan()
    assert scan.problems == ()
    shards = [(shard.step_id.step, shard.rank, shard.published) for shard in scan.shards]
    assert shards == [(1, 0, True), (1, 1, True), (2, 0, False), (2, 1, False)]
    first = scan.shards[2]
    assert first.root == written[step_id(2)].shard.root
    assert first == written[step_id(2)].shard
    assert (first.world, first.alike) == (2, slots[1].layout.identical_ranks)
    assert first.size_bytes == first.path.stat().st_size == slots[1].layout.size_bytes
    assert scan_shards(volume.root, run=RUN) == scan


def test_a_step_is_visible_to_readers_only_while_it_is_published(volume: Volume) -> None:
    for rank in range(2):
        write(volume, staged(make_layout(rank=rank), 1))
    shown = volume.root / str(step_id(1))
    assert not shown.exists()
    assert volume.publish_step(step_id(1)) == shown
    assert sorted(path.name for path in shown.iterdir()) == [shard_name(0, 2), shard_name(1, 2)]
    assert volume.publish_step(step_id(1)) == shown
    volume.unpublish(step_id(1))
    assert not shown.exists()
    assert [shard.published for shard in volume.scan().shards] == [False, False]


def test_losing_a_shard_hides_the_step_and_writing_it_again_shows_it(volume: Volume) -> None:
    slots = [staged(make_layout(rank=rank), 1) for rank in range(2)]
    paths = [write(volume, slot).shard.path for slot in slots]
    shown = volume.publish_step(step_id(1))
    volume.quarantine_file(paths[1], "digest")
    assert shown is not None
    assert not shown.exists()
    write(volume, slots[1])
    assert volume.publish_step(step_id(1)) == shown
    assert len(volume.scan().shards) == 2


def test_a_shard_written_beside_a_published_step_joins_it(volume: Volume) -> None:
    write(volume, staged(make_layout(rank=0), 1))
    volume.publish_step(step_id(1))
    write(volume, staged(make_layout(rank=1), 1))
    volume.publish_step(step_id(1))
    assert [shard.published for shard in volume.scan().shards] == [True, True]
    assert not (volume.root / "pending" / str(step_id(1))).exists()


def test_a_retired_step_is_deleted_but_open_readers_can_still_read_it(volume: Volume) -> None:
    slot = staged(make_layout(), 1)
    path = write(volume, slot).shard.path
    with path.open("rb") as reader:
        freed = volume.delete_step(step_id(1))
        assert freed >= slot.layout.size_bytes
        assert reader.read()[: len(slot.layout.header)] == slot.layout.header
    assert volume.scan().shards == ()
    assert list((volume.root / "retired").iterdir()) == []
    assert volume.delete_step(step_id(1)) == 0


def test_inconsistent_arguments_of_a_write_are_refused(volume: Volume) -> None:
    slot, other = staged(make_layout(), 1), staged(make_layout(rank=1, parameters=9000), 1)
    with pytest.raises(UsageError, match="bytes, not"):
        volume.write(other.view, slot.layout, slot.control)
    with pytest.raises(UsageError, match="of layout"):
        volume.write(other.view, other.layout, slot.control)
    with pytest.raises(UsageError, match="of run"):
        volume.write(slot.view, slot.layout, replace(slot.control, run="another"))
    slot.view[20] ^= 1
    with pytest.raises(UsageError, match="another header"):
        write(volume, slot)
    assert [path for path in volume.root.rglob("*") if "rank" in path.name] == []


def test_the_capacity_limit_holds_before_a_byte_is_written(
    open_volume: Callable[..., Volume],
) -> None:
    slot = staged(make_layout(), 1)
    volume = open_volume(capacity_bytes=int(1.5 * slot.layout.size_bytes) + 8192)
    write(volume, slot)
    assert 0 < volume.free_bytes() < slot.layout.size_bytes
    with pytest.raises(NoSpaceError, match=r"step 0001.*rank 0.*limit .* raise the capacity"):
        write(volume, staged(make_layout(), 2))
    assert [shard.step_id.step for shard in volume.scan().shards] == [1]
    volume.delete_step(step_id(1))
    write(volume, staged(make_layout(), 2))
    assert volume.failed == ""


def test_a_second_owner_of_a_volume_is_refused_with_the_pid_of_the_first(
    open_volume: Callable[..., Volume], volume: Volume
) -> None:
    with pytest.raises(StorageError, match=f"pid {os.getpid()}"):
        open_volume()
    volume.close()
    open_volume()


def test_a_volume_of_another_run_is_refused(volume: Volume) -> None:
    volume.save_record(volume.record)
    volume.close()
    with pytest.raises(ForeignError, match="'gpt', not 'bert'"):
        Volume(volume.root, run="bert")
    Volume(volume.root, run=RUN).close()


def test_the_error_for_a_directory_that_cannot_be_created_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match=str(tmp_path / "file")):
        Volume(tmp_path / "file" / RUN, run=RUN)


def test_a_step_that_is_being_written_is_neither_retired_nor_published(volume: Volume) -> None:
    slot = staged(make_layout(parameters=THREE_CHUNKS), 1)
    writer = threading.Thread(
        target=volume.write,
        args=(slot.view, slot.layout, slot.control),
        kwargs={"pace": RateLimit(2 * CHUNK)},
    )
    writer.start()
    pending = volume.root / "pending" / str(step_id(1))
    deadline = time.monotonic() + 10
    while not (pending.is_dir() and list(pending.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for act in (volume.delete_step, volume.publish_step):
        with pytest.raises(UsageError, match="being written"):
            act(step_id(1))
    volume.scan()
    assert volume.used_bytes() >= slot.layout.size_bytes
    writer.join()
    assert len(volume.scan().shards) == 1


def test_a_write_keeps_below_the_limit_of_bytes_per_second(volume: Volume) -> None:
    slot = staged(make_layout(parameters=THREE_CHUNKS), 1)
    limit = 4 * slot.layout.digests_begin
    written = volume.write(slot.view, slot.layout, slot.control, pace=RateLimit(limit))
    # The last chunk begins when all before it have had their time.
    assert written.seconds >= 2 * CHUNK / limit


def test_files_that_the_user_puts_beside_the_shards_are_not_touched(volume: Volume) -> None:
    write(volume, staged(make_layout(), 1))
    shown = volume.publish_step(step_id(1))
    assert shown is not None
    (shown / "config.json").write_text("{}")
    (volume.root / "notes.txt").write_text("mine")
    scan = volume.scan()
    assert (len(scan.shards), scan.problems) == (1, ())
    assert (shown / "config.json").exists()
    assert (volume.root / "notes.txt").exists()
