"""Drives that refuse, fill up or fail: real file systems on loop devices (root)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from keepstep.errors import NoSpaceError, StorageError
from keepstep_sidecar.agent.run_directories import prepare_directory
from keepstep_sidecar.concurrency import for_each_chunk
from keepstep_sidecar.volume.files import Filesystem, IoMode, probe_engine
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.volume.drives import command, die, fill, small_drive
from tests.volume.images import RUN, empty_slot, load, make_layout, staged, step_id

MIB = 1 << 20
XFS_BYTES = 320 * MIB
"""Less is refused by mkfs."""


@pytest.mark.root
def test_writes_to_a_full_drive_fail_clearly_and_succeed_once_there_is_space(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=32 * MIB)
    volume = Volume(drive / RUN, run=RUN)
    layout = make_layout(parameters=int(1.5 * MIB))
    first, second, third = (staged(layout, step) for step in (1, 2, 3))
    volume.write(first.view, layout, first.control)
    volume.write(second.view, layout, second.control)
    with pytest.raises(NoSpaceError, match="keep fewer steps"):
        volume.write(third.view, layout, third.control)
    assert [shard.step_id.step for shard in volume.scan().shards] == [1, 2]
    assert (volume.count_quarantined_files(), volume.failed) == (0, "")
    volume.delete_step(first.id)
    written = volume.write(third.view, layout, third.control)
    view = empty_slot(layout)
    load(volume, written.shard.path, view)
    assert view[: layout.digests_begin] == third.view[: layout.digests_begin]
    volume.close()


@pytest.mark.root
def test_a_shard_that_does_not_fit_on_a_full_drive_is_written_to_another(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=32 * MIB)
    full, other = Volume(drive / RUN, run=RUN), Volume(tmp_path / "other" / RUN, run=RUN)
    with (drive / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        fill(file)
    volumes = VolumeSet([full, other])
    slots = [staged(make_layout(rank=rank), 1) for rank in range(2)]
    written = [volumes.write(slot.view, slot.layout, slot.control) for slot in slots]
    assert all(write.shard.path.is_relative_to(other.root) for write in written)
    assert (full.failed, other.failed) == ("", "")
    assert [shard.rank for shard in volumes.scan().shards] == [0, 1]
    volumes.close()


@pytest.mark.root
def test_a_drive_that_is_full_to_the_last_block_can_still_be_restored_from(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=32 * MIB)
    volume = Volume(drive / RUN, run=RUN)
    slot = staged(make_layout(), 1)
    volume.write(slot.view, slot.layout, slot.control)
    volume.close()
    filler = drive / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        fill(file)
    volume = Volume(drive / RUN, run=RUN)
    (shard,) = volume.scan().shards
    load(volume, shard.path, empty_slot(slot.layout))
    later = staged(slot.layout, 2)
    with pytest.raises(NoSpaceError):
        volume.write(later.view, later.layout, later.control)
    volume.close()


@pytest.mark.root
def test_a_drive_that_fails_below_the_file_system_never_yields_a_durable_step(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    """The drive claims 64 MiB, but only 8 MiB are behind it: later writes fail in hardware."""
    behind = mounted("behind", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    drive = small_drive(mounted, behind / "image", size_bytes=64 * MIB)
    volume = Volume(drive / RUN, run=RUN)
    slot = staged(make_layout(parameters=3 * MIB), 1)
    with pytest.raises(StorageError):
        volume.write(slot.view, slot.layout, slot.control)
    assert not list((volume.root / "pending").rglob("rank-*"))
    volume.close()


@pytest.mark.root
@pytest.mark.parametrize("dying", [0, 1])
def test_a_failed_drive_does_not_block_publishing_and_retiring_on_another_drive(
    mounted: Callable[..., Path], tmp_path: Path, dying: int
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=XFS_BYTES, kind="xfs")
    dead, good = Volume(drive / RUN, run=RUN), Volume(tmp_path / "good" / RUN, run=RUN)
    volumes = VolumeSet([dead, good] if dying == 0 else [good, dead])
    for step in (1, 2):
        slots = [staged(make_layout(rank=rank), step) for rank in range(2)]
        written = [volumes.write(slot.view, slot.layout, slot.control) for slot in slots]
    volumes.publish_step(step_id(1))
    die(drive)
    made_of = [write.shard.path for write in written]
    with pytest.raises(StorageError):
        volumes.publish_step(step_id(2), made_of=made_of)
    assert not (good.root / str(step_id(2))).exists(), "a part of a step is not shown"
    assert volumes.delete_step(step_id(1)) > 0
    assert not (good.root / str(step_id(1))).exists()
    assert (bool(dead.failed), good.failed) == (True, "")
    scan = volumes.scan()
    assert list(scan.unread) == [dead.root]
    assert {
        (shard.step_id.step, shard.path.is_relative_to(good.root)) for shard in scan.shards
    } == {(2, True)}
    slots = [staged(make_layout(rank=rank), 3) for rank in range(2)]
    written = [volumes.write(slot.view, slot.layout, slot.control) for slot in slots]
    shown = volumes.publish_step(step_id(3), made_of=[write.shard.path for write in written])
    assert shown == good.root / str(step_id(3))
    assert len(list(shown.glob("rank-*"))) == 2


@pytest.mark.root
def test_a_file_system_without_direct_io_is_written_through_the_cache(
    mounted: Callable[..., Path],
) -> None:
    """ramfs has no O_DIRECT and no fallocate."""
    drive = mounted("ram", "-t", "ramfs", "ramfs")
    volume = Volume(drive / RUN, run=RUN)
    assert volume.engine is IoMode.BUFFERED
    assert volume.engine_reason == f"O_DIRECT refused: {os.strerror(errno.EINVAL)}"
    slot = staged(make_layout(), 1)
    written = volume.write(slot.view, slot.layout, slot.control)
    load(volume, written.shard.path, empty_slot(slot.layout))
    volume.close()


def test_the_io_engine_probe_leaves_no_file(tmp_path: Path) -> None:
    engine, reason = probe_engine(Filesystem(), tmp_path)
    assert engine in IoMode
    assert reason
    assert list(tmp_path.iterdir()) == []


class Refusing(Filesystem):
    """Says what overlay and some network file systems say to O_DIRECT."""

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


def test_a_refused_o_direct_is_reported_and_buffered_io_is_used(
    open_volume: Callable[..., Volume],
) -> None:
    volume = open_volume(filesystem=Refusing())
    assert (volume.engine, volume.engine_reason) == (
        IoMode.BUFFERED,
        "O_DIRECT refused: Invalid argument",
    )
    slot = staged(make_layout(), 1)
    written = volume.write(slot.view, slot.layout, slot.control)
    load(volume, written.shard.path, empty_slot(slot.layout))


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:4096]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:4096]], at))
    volume = Volume(tmp_path / RUN, run=RUN)
    slot = staged(make_layout(), 1)
    written = volume.write(slot.view, slot.layout, slot.control)
    view = empty_slot(slot.layout)
    load(volume, written.shard.path, view)
    assert view[: slot.layout.digests_begin] == slot.view[: slot.layout.digests_begin]
    volume.close()


def test_the_first_error_of_a_worker_thread_stops_the_others_and_is_raised() -> None:
    done: list[int] = []

    def work(index: int) -> None:
        if index == 3:
            raise OSError(errno.EIO, "chunk 3")
        done.append(index)

    with pytest.raises(OSError, match="chunk 3"):
        for_each_chunk(work, 10_000, threads=4)
    assert len(done) < 10_000


@pytest.mark.parametrize(("may_start", "done"), [(2, 100), (0, 0)])
def test_fewer_threads_do_the_work_when_no_more_can_be_started(
    monkeypatch: pytest.MonkeyPatch, may_start: int, done: int
) -> None:
    start, started, seen = threading.Thread.start, [], []

    def limited(self: threading.Thread) -> None:
        if len(started) == may_start:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with nullcontext() if may_start else pytest.raises(RuntimeError, match="new thread"):
        for_each_chunk(seen.append, 100, threads=16)
    assert len(seen) == done
    assert not any(thread.is_alive() for thread in started)


def test_only_writer_threads_run_with_a_lower_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    before, seen = niceness(), []
    for_each_chunk(lambda index: seen.append(niceness()), 4, threads=1, niceness=10)
    assert seen == [max(10, before)] * 4
    assert niceness() == before


@pytest.mark.root
def test_preparing_an_existing_directory_on_a_read_only_drive_succeeds(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=32 * MIB)
    directory = drive / "team-a" / "gpt" / "0"
    prepare_directory(directory)
    command("mount", "-o", "remount,ro", drive)
    prepare_directory(directory)
    with pytest.raises(StorageError, match="Read-only"):
        prepare_directory(drive / "team-a" / "gpt" / "1")
