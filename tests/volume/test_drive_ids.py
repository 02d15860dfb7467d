"""How a volume names the file system that it lies on: real ext4, XFS and btrfs on loop devices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from keepstep_sidecar.volume.files import drive_id
from tests.volume.drives import command, made, small_drive

XFS_BYTES = 320 << 20
"""Less is refused by mkfs."""


def named(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return drive_id(fd)
    finally:
        os.close(fd)


def uuid_of(image: Path) -> str:
    asked = ["blkid", "-p", "-s", "UUID", "-o", "value", str(image)]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def here(
    mounted: Callable[..., Path], tmp_path: Path
) -> Callable[..., AbstractContextManager[Path]]:
    """Mounts at one place for a while, where `mounted` would mount until the end of the test."""

    @contextmanager
    def mount(*words: str | Path) -> Iterator[Path]:
        point = tmp_path / "here"
        point.mkdir(exist_ok=True)
        command("mount", *words, point)
        try:
            yield point
        finally:
            command("umount", point)

    return mount


@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_the_id_of_a_file_system_stays_the_same_until_it_is_reformatted(
    mounted: Callable[..., Path],
    here: Callable[..., AbstractContextManager[Path]],
    tmp_path: Path,
    kind: str,
) -> None:
    image = made(tmp_path / "image", size_bytes=XFS_BYTES, kind=kind)
    with here("-o", "loop", image) as drive:
        first, device = named(drive), drive.stat().st_dev
        assert first.partition("@")[0] == uuid_of(image)
    mounted("other", "-o", "loop", made(tmp_path / "other-image", size_bytes=32 << 20))
    with here("-o", "loop", image) as drive:
        assert drive.stat().st_dev != device, "as when a node starts and finds its drives anew"
        assert named(drive) == first
    made(image, size_bytes=XFS_BYTES, kind=kind)
    with here("-o", "loop", image) as drive:
        again = named(drive)
    assert again.partition("@")[0] == uuid_of(image) != first.partition("@")[0]
    assert again.partition("@")[2] == first.partition("@")[2], "at the same position"


@pytest.mark.root
def test_an_unmounted_drive_is_recognised_by_another_file_system_id(
    mounted: Callable[..., Path],
    here: Callable[..., AbstractContextManager[Path]],
    tmp_path: Path,
) -> None:
    node = mounted("node", "-o", "loop", made(tmp_path / "root", size_bytes=32 << 20))
    point = node / "mnt/nvme"
    (point / "keepstep").mkdir(parents=True)  # as the kubelet makes it
    with here("--bind", point / "keepstep") as bound:
        without = named(bound)
    with here("-o", "loop", made(tmp_path / "image", size_bytes=32 << 20)) as drive:
        (drive / "keepstep").mkdir()
        first = named(mounted("bound", "--bind", drive / "keepstep"))
    assert "" not in (without, first)
    assert without.partition("@")[0] != first.partition("@")[0]
    assert without.partition("@")[2] != first.partition("@")[2]


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "btrfs", "proc"])
def test_a_file_system_with_an_unstable_id_gets_no_id(
    mounted: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    if kind == "btrfs":
        size = 128 << 20
        path = small_drive(mounted, tmp_path / "image", size_bytes=size, kind=kind)
    else:
        path = mounted("other", "-t", kind, "none")
    assert named(path) == ""
