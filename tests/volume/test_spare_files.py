"""A retired shard is written over by the next image of its rank, and by nothing that could notice.

Two files are the same one if they have the same inode."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.errors import NoSpaceError
from keepstep.steps import shard_name
from keepstep_sidecar.volume import run_tree
from keepstep_sidecar.volume.files import Filesystem, IoMode
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import RUN, Slot, empty_slot, load, make_layout, staged, step_id


def write(volume: Volume, slot: Slot) -> Path:
    return volume.write(slot.view, slot.layout, slot.control).shard.path


def spare_shard(volume: Volume, *, rank: int = 0) -> int:
    """Write step 1 of this rank and retire it. Returns the inode of its file."""
    inode = write(volume, staged(make_layout(rank=rank), 1)).stat().st_ino
    volume.delete_step(step_id(1))
    assert [path.name for path in spare(volume)] == [shard_name(rank, 2)]
    return inode


def spare(volume: Volume) -> list[Path]:
    """The spare files; everything else that was retired is deleted."""
    assert list((volume.root / "retired").iterdir()) == []
    return sorted((volume.root / "spare").iterdir())


def left_over(volume: Volume) -> list[Path]:
    return list(volume.root.rglob(".rank-*"))


class Full(Filesystem):
    """A volume on which a new file finds no space while there is a spare one."""

    def __init__(self, root: Path, code: int) -> None:
        self._root = root
        self._code = code

    def allocate(self, fd: int, size_bytes: int) -> None:
        if list((self._root / "spare").glob("*")):
            raise OSError(self._code, os.strerror(self._code))
        super().allocate(fd, size_bytes)


@pytest.mark.parametrize("engine", list(IoMode))
def test_the_next_image_of_a_rank_overwrites_its_spare_file(
    open_volume: Callable[..., Volume], engine: IoMode
) -> None:
    volume = open_volume(engine=engine)
    inode = spare_shard(volume)
    slot = staged(make_layout(), 2)
    path = write(volume, slot)
    assert path.stat().st_ino == inode
    view = empty_slot(slot.layout)
    load(volume, path, view)
    assert view[: slot.layout.digests_begin] == slot.view[: slot.layout.digests_begin]
    assert [shard.step_id for shard in volume.scan().shards] == [step_id(2)]
    assert spare(volume) == []


def test_a_file_that_a_process_has_mapped_is_not_overwritten(volume: Volume) -> None:
    path = write(volume, staged(make_layout(), 1))
    before = path.read_bytes()
    with path.open("rb") as reader:
        mapped = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
    with mapped:
        volume.delete_step(step_id(1))
        write(volume, staged(make_layout(), 2))
        assert mapped[:] == before


def test_a_file_with_a_second_hard_link_is_not_overwritten(volume: Volume, tmp_path: Path) -> None:
    path = write(volume, staged(make_layout(), 1))
    before = path.read_bytes()
    os.link(path, tmp_path / "copy")
    volume.delete_step(step_id(1))
    write(volume, staged(make_layout(), 2))
    assert (tmp_path / "copy").read_bytes() == before


_ASK_WHILE_OTHERS_OPEN = """
import os, sys, threading
from keepstep_sidecar.volume import files
fd, alone = os.open(sys.argv[1], os.O_RDWR), set()
def others():
    while True:
        os.close(os.open(sys.argv[1], os.O_RDONLY))
threading.Thread(target=others, daemon=True).start()
while alone != {True, False}:
    alone.add(files.is_open_only_as(fd))
for _ in range(20_000):
    files.is_open_only_as(fd)
os._exit(0)
"""


def test_opening_a_file_during_the_lease_check_does_not_kill_the_sidecar(tmp_path: Path) -> None:
    """The kernel's signal to whoever holds a lease ends a process by default."""
    (tmp_path / "file").write_bytes(b"x")
    command = [sys.executable, "-c", _ASK_WHILE_OTHERS_OPEN, str(tmp_path / "file")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_an_image_of_another_size_gets_a_new_file(volume: Volume) -> None:
    inode = spare_shard(volume)
    slot = staged(make_layout(parameters=7000), 2)
    path = write(volume, slot)
    assert path.stat().st_ino != inode
    load(volume, path, empty_slot(slot.layout))


def test_links_to_other_volumes_are_not_used_as_spare_files(
    open_volume: Callable[..., Volume], tmp_path: Path
) -> None:
    volume, other = open_volume("one"), open_volume("two")
    write(volume, staged(make_layout(rank=0), 1))
    foreign = write(other, staged(make_layout(rank=1), 1))
    volume.publish_step(step_id(1), elsewhere=[foreign])
    volume.delete_step(step_id(1))
    assert [path.name for path in spare(volume)] == [shard_name(0, 2)]
    write(volume, staged(make_layout(rank=1), 2))
    assert foreign.read_bytes()[-4096:] != bytes(4096)


def test_the_seal_of_a_spare_file_is_erased_before_it_is_overwritten(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_shard(volume)
    slot, seals = staged(make_layout(), 2), list[bytes]()
    allocate = Filesystem.allocate

    def check(self: Filesystem, fd: int, size_bytes: int) -> None:
        (path,) = left_over(volume)
        seals.append(path.read_bytes()[slot.layout.control_begin :])
        allocate(self, fd, size_bytes)

    monkeypatch.setattr(Filesystem, "allocate", check)
    write(volume, slot)
    assert seals == [bytes(4096)]


@pytest.mark.parametrize("opened", ["before it is retired", "as a spare file"])
def test_a_file_that_a_process_has_open_is_not_overwritten(volume: Volume, opened: str) -> None:
    path = write(volume, staged(make_layout(), 1))
    before = path.read_bytes()
    reader = path.open("rb") if opened == "before it is retired" else None
    volume.delete_step(step_id(1))
    with reader or spare(volume)[0].open("rb") as file:
        write(volume, staged(make_layout(), 2))
        assert file.read() == before
    assert (spare(volume), left_over(volume)) == ([], [])


def test_a_spare_file_is_not_reachable_through_an_open_handle_of_the_step_directory(
    volume: Volume,
) -> None:
    path = write(volume, staged(make_layout(), 1))
    directory = os.open(path.parent, os.O_RDONLY)
    volume.delete_step(step_id(1))
    with pytest.raises(FileNotFoundError):
        os.open(path.name, os.O_RDONLY, dir_fd=directory)
    os.close(directory)


def test_a_spare_file_is_deleted_if_the_kernel_cannot_report_other_readers(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tree, "is_open_only_as", lambda *_: False)
    inode = spare_shard(volume)
    with (volume.root / "spare" / shard_name(0, 2)).open() as file:  # so its number is not free
        assert write(volume, staged(make_layout(), 2)).stat().st_ino != inode
        assert os.fstat(file.fileno()).st_nlink == 0


@pytest.mark.parametrize("what", ["mode", "attribute"])
def test_the_next_shard_does_not_inherit_mode_or_attributes_of_the_spare_file(
    volume: Volume, what: str
) -> None:
    path = write(volume, staged(make_layout(), 1))
    usual = stat.S_IMODE(path.stat().st_mode)
    if what == "mode":
        path.chmod(0o666)
    else:
        os.setxattr(path, "user.label", b"secret")
    volume.delete_step(step_id(1))
    later = write(volume, staged(make_layout(), 2))
    assert stat.S_IMODE(later.stat().st_mode) == usual
    assert "user.label" not in os.listxattr(later)


@pytest.mark.parametrize("what", ["a directory", "a pipe", "a scrap"])
def test_an_entry_that_only_has_a_shard_name_is_not_used_as_a_spare_file(
    volume: Volume, what: str
) -> None:
    path = write(volume, staged(make_layout(), 1))
    path.unlink()
    {"a directory": Path.mkdir, "a pipe": os.mkfifo, "a scrap": Path.touch}[what](path)
    volume.delete_step(step_id(1))
    slot = staged(make_layout(), 2)
    load(volume, write(volume, slot), empty_slot(slot.layout))
    assert (spare(volume), left_over(volume)) == ([], [])


def test_only_files_of_the_last_retired_step_are_kept_as_spare_files(volume: Volume) -> None:
    for step in (1, 2):
        write(volume, staged(make_layout(rank=0), step))
    write(volume, staged(make_layout(rank=1), 1))
    volume.delete_step(step_id(1))
    assert [path.name for path in spare(volume)] == [shard_name(rank, 2) for rank in range(2)]
    volume.delete_step(step_id(2))
    assert [path.name for path in spare(volume)] == [shard_name(0, 2)]


def test_an_image_is_written_to_a_new_file_if_the_spare_file_fails(
    volume: Volume, armed: Callable[[str], None]
) -> None:
    for point in ("spare.unseal", "spare.sync"):
        inode = spare_shard(volume)
        armed(f"{point}:eio")
        slot = staged(make_layout(), 2)
        path = write(volume, slot)
        assert (path.stat().st_ino != inode, left_over(volume)) == (True, [])
        load(volume, path, empty_slot(slot.layout))
        volume.delete_step(step_id(2), reuse=False)
    assert volume.failed == ""


@pytest.mark.parametrize("act", [Volume.close, Volume.scan])
def test_closing_or_scanning_a_volume_removes_its_spare_files(
    volume: Volume, act: Callable[[Volume], object]
) -> None:
    spare_shard(volume)
    act(volume)
    assert spare(volume) == []


def test_a_volume_that_was_removed_deletes_nothing_of_its_successor(
    open_volume: Callable[..., Volume],
) -> None:
    volume = open_volume()
    shutil.rmtree(volume.root)
    successor = open_volume()
    spare_shard(successor)
    volume.close()
    assert spare(successor)


def test_a_spare_file_that_cannot_be_deleted_hides_no_shard(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_shard(volume)
    write(volume, staged(make_layout(rank=1), 2))

    def refuse(self: Filesystem, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Filesystem, "unlink", refuse)
    assert [shard.rank for shard in volume.scan().shards] == [1]
    volume.close()


def test_a_spare_file_counts_as_free_space_and_is_deleted_when_space_is_needed(
    open_volume: Callable[..., Volume],
) -> None:
    size = make_layout().size_bytes
    volume = open_volume(capacity_bytes=size + 8192)
    spare_shard(volume, rank=1)
    assert (volume.used_bytes() < 8192, volume.free_bytes() >= size) == (True, True)
    write(volume, staged(make_layout(rank=0), 2))
    assert spare(volume) == []


def test_a_spare_file_does_not_reduce_the_space_for_the_image_that_overwrites_it(
    open_volume: Callable[..., Volume],
) -> None:
    volume = open_volume(capacity_bytes=make_layout().size_bytes + 8192)
    inode = spare_shard(volume)
    assert write(volume, staged(make_layout(), 2)).stat().st_ino == inode
    with pytest.raises(NoSpaceError):
        write(volume, staged(make_layout(), 3))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_to_a_full_drive_is_retried_after_the_spare_file_was_deleted(
    open_volume: Callable[..., Volume], tmp_path: Path, code: int
) -> None:
    volume = open_volume(filesystem=Full(tmp_path / "disk" / RUN, code))
    write(volume, staged(make_layout(rank=0), 1))
    for make in (
        lambda: write(volume, staged(make_layout(rank=1), 2)),
        lambda: volume.with_room(lambda: allocated(volume)),
    ):
        volume.delete_step(step_id(1))
        make()
        assert spare(volume) == []
        write(volume, staged(make_layout(rank=0), 1))


def allocated(volume: Volume) -> None:
    with (volume.root / "other").open("wb") as file:
        volume.filesystem.allocate(file.fileno(), 4096)


def test_no_spare_file_is_kept_on_a_nearly_full_drive(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Filesystem, "free_bytes", lambda *_: make_layout().size_bytes - 4096)
    write(volume, staged(make_layout(), 1))
    volume.delete_step(step_id(1))
    assert spare(volume) == []
