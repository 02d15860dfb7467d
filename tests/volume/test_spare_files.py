"""A retired shard is written over by the next image of its rank, and by nothing that could notice.

Two files are the same one if they have the same inode."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.errors import NoSpaceError
from keepstep.steps import shard_name
from keepstep_sidecar.volume.direct_io import Engine
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import Slot, empty_slot, load, make_layout, staged, step_id


def write(volume: Volume, slot: Slot) -> Path:
    return volume.write(slot.view, slot.layout, slot.control).shard.path


def retired_shard(volume: Volume, *, rank: int = 0) -> int:
    """Write step 1 of this rank and retire it. Returns the inode of its file."""
    inode = write(volume, staged(make_layout(rank=rank), 1)).stat().st_ino
    volume.retire(step_id(1))
    return inode


def left(volume: Volume) -> list[Path]:
    return [path for path in (volume.root / "retired").rglob("*") if path.is_file()]


@pytest.mark.parametrize("engine", list(Engine))
def test_the_next_image_of_the_rank_is_written_over_it(
    open_volume: Callable[..., Volume], engine: Engine
) -> None:
    volume = open_volume(engine=engine)
    inode = retired_shard(volume)
    slot = staged(make_layout(), 2)
    path = write(volume, slot)
    assert path.stat().st_ino == inode
    view = empty_slot(slot.layout)
    load(volume, path, view)
    assert view[: slot.layout.digests_begin] == slot.view[: slot.layout.digests_begin]
    assert [shard.step_id for shard in volume.scan().shards] == [step_id(2)]
    assert left(volume) == []


def test_its_seal_is_gone_before_it_is_written_over(volume: Volume) -> None:
    retired_shard(volume)
    (path,) = left(volume)
    assert path.read_bytes()[make_layout().control_begin :] == bytes(4096)


def test_a_file_that_anybody_has_open_keeps_its_bytes(volume: Volume) -> None:
    path = write(volume, staged(make_layout(), 1))
    before = path.read_bytes()
    with path.open("rb") as reader:
        volume.retire(step_id(1))
        write(volume, staged(make_layout(), 2))
        assert reader.read() == before
    assert left(volume) == []


def test_a_file_that_anybody_has_mapped_keeps_its_bytes(volume: Volume) -> None:
    path = write(volume, staged(make_layout(), 1))
    before = path.read_bytes()
    with path.open("rb") as reader:
        mapped = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
    with mapped:
        volume.retire(step_id(1))
        write(volume, staged(make_layout(), 2))
        assert mapped[:] == before


def test_a_file_with_another_name_keeps_its_bytes(volume: Volume, tmp_path: Path) -> None:
    path = write(volume, staged(make_layout(), 1))
    before = path.read_bytes()
    os.link(path, tmp_path / "copy")
    volume.retire(step_id(1))
    write(volume, staged(make_layout(), 2))
    assert (tmp_path / "copy").read_bytes() == before


_ASK_WHILE_OTHERS_OPEN = """
import os, sys, threading
from keepstep_sidecar.volume.filesystem import Filesystem
fd, alone = os.open(sys.argv[1], os.O_RDWR), set()
def others():
    while True:
        os.close(os.open(sys.argv[1], os.O_RDONLY))
threading.Thread(target=others, daemon=True).start()
while alone != {True, False}:
    alone.add(Filesystem().is_open_here_only(fd))
for _ in range(20_000):
    Filesystem().is_open_here_only(fd)
os._exit(0)
"""


def test_whoever_opens_it_meanwhile_does_no_harm(tmp_path: Path) -> None:
    """The kernel's signal to whoever holds a lease ends a process by default."""
    (tmp_path / "file").write_bytes(b"x")
    command = [sys.executable, "-c", _ASK_WHILE_OTHERS_OPEN, str(tmp_path / "file")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_where_the_kernel_cannot_tell_it_is_deleted(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Filesystem, "is_open_here_only", lambda *_: False)
    retired_shard(volume)
    assert left(volume) == []
    write(volume, staged(make_layout(), 2))


@pytest.mark.parametrize("what", ["a directory", "a pipe", "a scrap"])
def test_what_only_has_the_name_of_a_shard_is_deleted(volume: Volume, what: str) -> None:
    path = write(volume, staged(make_layout(), 1))
    path.unlink()
    {"a directory": Path.mkdir, "a pipe": os.mkfifo, "a scrap": Path.touch}[what](path)
    volume.retire(step_id(1))
    volume.retire(step_id(2))
    write(volume, staged(make_layout(), 2))
    volume.close()
    assert list((volume.root / "retired").iterdir()) == []


def test_an_image_of_another_size_gets_a_new_file(volume: Volume) -> None:
    inode = retired_shard(volume)
    slot = staged(make_layout(parameters=7000), 2)
    path = write(volume, slot)
    assert (path.stat().st_ino, path.stat().st_size) != (inode, make_layout().size_bytes)
    load(volume, path, empty_slot(slot.layout))


def test_an_image_of_another_rank_gets_a_new_file(volume: Volume) -> None:
    inode = retired_shard(volume, rank=1)
    assert write(volume, staged(make_layout(rank=0), 2)).stat().st_ino != inode


def test_only_the_step_that_was_retired_last_is_kept(volume: Volume) -> None:
    for step in (1, 2, 3):
        write(volume, staged(make_layout(), step))
    for step in (1, 2):
        volume.retire(step_id(step))
    assert [path.parent.name for path in left(volume)] == [f"{step_id(2)}.1"]


def test_a_file_that_somebody_removed_is_made_anew(volume: Volume) -> None:
    retired_shard(volume)
    (path,) = left(volume)
    path.unlink()
    write(volume, staged(make_layout(), 2))


@pytest.mark.parametrize("act", [Volume.close, Volume.scan])
def test_nothing_of_it_stays_after(volume: Volume, act: Callable[[Volume], object]) -> None:
    retired_shard(volume)
    assert left(volume)
    act(volume)
    assert list((volume.root / "retired").iterdir()) == []


def test_it_counts_as_free_and_is_deleted_when_others_need_its_space(
    open_volume: Callable[..., Volume],
) -> None:
    size = make_layout().size_bytes
    volume = open_volume(capacity_bytes=size + 8192)
    retired_shard(volume, rank=1)
    assert left(volume)
    assert (volume.used_bytes() < 8192, volume.free_bytes() >= size) == (True, True)
    write(volume, staged(make_layout(rank=0), 2))
    assert left(volume) == []


def test_it_takes_no_space_from_its_own_successor(open_volume: Callable[..., Volume]) -> None:
    volume = open_volume(capacity_bytes=make_layout().size_bytes + 8192)
    inode = retired_shard(volume)
    assert write(volume, staged(make_layout(), 2)).stat().st_ino == inode
    with pytest.raises(NoSpaceError):
        write(volume, staged(make_layout(), 3))


def test_room_for_files_of_others_is_made_of_it(open_volume: Callable[..., Volume]) -> None:
    size = make_layout().size_bytes
    volume = open_volume(capacity_bytes=2 * size)
    retired_shard(volume)
    volume.make_room(size // 2)
    assert left(volume)
    volume.make_room(2 * size - 8192)
    assert left(volume) == []


def test_on_a_drive_that_is_nearly_full_it_is_deleted_at_once(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Filesystem, "free_bytes", lambda *_: make_layout().size_bytes - 4096)
    retired_shard(volume)
    assert left(volume) == []


def test_links_to_other_volumes_are_no_spare_files(
    open_volume: Callable[..., Volume], tmp_path: Path
) -> None:
    volume, other = open_volume("one"), open_volume("two")
    write(volume, staged(make_layout(rank=0), 1))
    foreign = write(other, staged(make_layout(rank=1), 1))
    volume.publish(step_id(1), elsewhere=[foreign])
    volume.retire(step_id(1))
    write(volume, staged(make_layout(rank=1), 2))
    assert foreign.read_bytes()[-4096:] != bytes(4096)
    assert foreign.name == shard_name(1, 2)
