"""Copies whose chunks lie on the blocks of the pod's own shard: on real file systems (root)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keepstep.image.layout import CHUNK_BYTES
from keepstep_sidecar.tiers.incoming_copy import IncomingCopy
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.tiers.peer.served_shards import ServedShards
from keepstep_sidecar.volume.files import Filesystem, aligned_buffer
from keepstep_sidecar.volume.run_tree import ShardName
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import flip, until
from tests.peer.authority import Authority
from tests.peer.nodes import Node, running
from tests.peer.test_replicas import alike, write
from tests.tiers.local import durable
from tests.volume.drives import command, die, fill, small_drive
from tests.volume.images import RUN, step_id

pytestmark = pytest.mark.root

ID = step_id(5)
DRIVE_BYTES = 512 << 20
SHARING = [("ext4", False, 2), ("xfs", True, 1), ("btrfs", True, 2)]
"""btrfs writes it once, and gives back what was reserved for the copy only with all of the copy."""


@dataclass
class Keeper:
    """A pod with a shard of its own on `drive`, and copies that it keeps there of its twin's."""

    drive: Path
    sent: bytes = field(repr=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.volume = Volume(self.drive / RUN, run=RUN)
        self.copies = KeptCopies([self.volume], run=RUN)
        self.copies.scan()

    def begin(self) -> IncomingCopy:
        name = ShardName(id=ID, rank=0, world=2)
        layout = alike(0).layout
        manifest = self.sent[: len(layout.header)] + self.sent[layout.digests_begin :]
        part = self.copies.begin(name, memoryview(manifest), whose="the test")
        assert part is not None
        return part

    def take(self, part: IncomingCopy, volumes: VolumeSet | None = None) -> None:
        """From the own shards of `volumes`."""
        shards = ServedShards(volumes or VolumeSet([self.volume]), self.copies, run=RUN)
        for other in shards.find_similar_shards(ShardName(id=ID, rank=0, world=2)):
            self.copies.reuse_chunks_from(part, other)

    def finish(self, part: IncomingCopy) -> bytes:
        """What is missing arrives; the copy's bytes, as they lie on the drive."""
        for chunk in part.missing:
            begin, end = part.manifest.bounds_of_chunk(chunk)
            with aligned_buffer(end - begin) as buffer, memoryview(buffer) as data:
                data[:] = self.sent[begin:end]
                self.copies.write_chunk(part, chunk, data, whose="the test")
        self.copies.seal(part)
        return part.path.read_bytes()

    def close(self) -> None:
        self.copies.close()
        self.volume.close()


@pytest.fixture
def sent(tmp_path: Path) -> bytes:
    """A durable shard of rank 0."""
    sender = Volume(tmp_path / "sender" / RUN, run=RUN)
    slot = alike(0)
    path = sender.write(slot.view, slot.layout, slot.control).shard.path
    sender.close()
    return path.read_bytes()


Keep = Callable[[str], Keeper]


@pytest.fixture
def keep(mounted: Callable[..., Path], tmp_path: Path, sent: bytes) -> Iterator[Keep]:
    made: list[Keeper] = []

    def make(kind: str) -> Keeper:
        drive = small_drive(mounted, tmp_path / "image", size_bytes=DRIVE_BYTES, kind=kind)
        made.append(Keeper(drive, sent))
        return made[0]

    yield make
    for keeper in made:
        keeper.close()


def own(volume: Volume) -> Path:
    slot = alike(1)
    return volume.write(slot.view, slot.layout, slot.control).shard.path


def taken_bytes(drive: Path) -> int:
    """Of the file system, whoever's they are."""
    os.sync()
    status = os.statvfs(drive)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.mark.parametrize(("kind", "shares", "times"), SHARING)
def test_equal_chunks_are_stored_once_if_the_file_system_can_share_blocks(
    keep: Keep, sent: bytes, kind: str, shares: bool, times: int
) -> None:
    keeper = keep(kind)
    own(keeper.volume)
    before = taken_bytes(keeper.drive)
    part = keeper.begin()
    keeper.take(part)
    assert part.missing == (0,), "the chunk with the header is another one"
    assert keeper.finish(part) == sent
    more = taken_bytes(keeper.drive) - before
    alike_bytes = part.manifest.layout.digests_begin - CHUNK_BYTES
    assert keeper.copies.shared_bytes == (alike_bytes if shares else 0)
    assert (more > 2 * CHUNK_BYTES) == (times == 2), f"{more} bytes"
    assert keeper.volume.used_bytes() >= 2 * len(sent), "it would need them without the other one"
    keeper.volume.delete_step(ID)
    assert part.path.read_bytes() == sent
    keeper.copies.scan()
    assert [shard.path for shard in keeper.copies.all()] == [part.path]


def test_equal_chunks_on_two_file_systems_are_written(
    keep: Keep, sent: bytes, tmp_path: Path
) -> None:
    keeper = keep("xfs")
    elsewhere = Volume(tmp_path / "other" / RUN, run=RUN)
    own(elsewhere)
    part = keeper.begin()
    keeper.take(part, VolumeSet([elsewhere]))
    elsewhere.close()
    assert part.missing == (0,)
    assert keeper.finish(part) == sent
    assert keeper.copies.shared_bytes == 0


def test_corrupt_chunks_of_the_local_shard_are_not_shared(keep: Keep, sent: bytes) -> None:
    keeper = keep("xfs")
    path = own(keeper.volume)
    flip(path, 2 * CHUNK_BYTES + 77)
    rotten = path.read_bytes()
    part = keeper.begin()
    keeper.take(part)
    assert part.missing == (0, 2)
    assert keeper.finish(part) == sent
    assert path.read_bytes() == rotten, "what arrives for the copy is written to the copy alone"


def test_a_copy_on_a_full_drive_keeps_its_reserved_blocks(keep: Keep, sent: bytes) -> None:
    keeper = keep("xfs")
    own(keeper.volume)
    part = keeper.begin()
    filler = keeper.drive / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        fill(file)
    keeper.take(part)
    assert part.missing == (0,)
    assert keeper.finish(part) == sent


@pytest.mark.parametrize("sealed", [False, True])
def test_a_power_cut_leaves_a_complete_copy_or_none(keep: Keep, sent: bytes, sealed: bool) -> None:
    keeper = keep("xfs")
    own(keeper.volume)
    part = keeper.begin()
    keeper.take(part)
    assert part.shared_bytes
    if sealed:
        keeper.finish(part)
    power_cut(keeper)
    keeper.open()
    assert keeper.copies.unreadable == ""
    assert [shard.path for shard in keeper.copies.all()] == [part.path] * sealed
    assert not keeper.volume.count_quarantined_files()
    if not sealed:
        part = keeper.begin()
        keeper.take(part)
        assert keeper.finish(part) == sent
    assert part.path.read_bytes() == sent


def test_shared_blocks_are_on_the_medium_once_the_file_is_synced(keep: Keep) -> None:
    """What a seal rests on; without the sync they were not there after the power cut."""
    keeper, filesystem = keep("xfs"), Filesystem()
    path, data = keeper.drive / "copy", os.urandom(CHUNK_BYTES)
    (keeper.drive / "own").write_bytes(data)
    own_fd, fd = (
        filesystem.open(path, os.O_RDWR | os.O_CREAT) for path in (keeper.drive / "own", path)
    )
    filesystem.allocate(fd, CHUNK_BYTES)
    for open_fd in (own_fd, fd):
        filesystem.sync_data(open_fd)
    filesystem.sync_directory(keeper.drive)
    filesystem.clone_range(own_fd, fd, 0, CHUNK_BYTES)
    filesystem.sync_data(fd)
    for open_fd in (own_fd, fd):
        filesystem.close_file(open_fd)
    power_cut(keeper)
    assert path.read_bytes() == data


def power_cut(keeper: Keeper) -> None:
    """The file system stops, and what it has not yet written of its log is lost."""
    die(keeper.drive)
    keeper.close()
    command("umount", keeper.drive)
    command("mount", "-o", "loop", keeper.drive.with_name("image"), keeper.drive)


async def test_the_status_reports_the_number_of_shared_bytes(
    mounted: Callable[..., Path], tmp_path: Path, authority: Authority
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=DRIVE_BYTES, kind="xfs")
    here = Node(tmp_path, 0, authority.files(0))
    buddy = Node(drive, 1, authority.files(1))
    here.knows(buddy, buddies=(buddy,))
    buddy.knows(here)
    slot = alike(0)
    async with running(here, buddy):
        write(buddy, alike(1))
        durable(here.remote_tier, write(here, slot))
        await until(lambda: here.remote_tier.status().sent == 1)
        shared_bytes = buddy.remote_tier.status().shared_bytes
        assert shared_bytes == slot.layout.digests_begin - CHUNK_BYTES
