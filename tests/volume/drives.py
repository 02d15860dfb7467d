"""Small file systems of their own on loop devices, for tests as root."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

_OPTIONS = {
    "ext4": ("-q", "-F", "-O", "^has_journal", "-m", "0"),
    "xfs": ("-q", "-m", "reflink=1"),
    "btrfs": ("-q",),
}


def command(*words: str | Path) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True, timeout=30)


def small_drive(
    mounted: Callable[..., Path], image: Path, *, size_bytes: int, kind: str = "ext4"
) -> Path:
    """A file system of its own in the file `image`; skips where nothing makes one."""
    return mounted("drive", "-o", "loop", made(image, size_bytes=size_bytes, kind=kind))


def made(image: Path, *, size_bytes: int, kind: str = "ext4") -> Path:
    """The file `image` with a new file system in it."""
    if not shutil.which(make := f"mkfs.{kind}"):
        pytest.skip(f"needs {make} to make a small drive")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    command(make, *_OPTIONS[kind], image)
    return image


_XFS_IOC_GOINGDOWN = 0x8004587D
_WITHOUT_LOG = 2


def die(drive: Path) -> None:
    """An XFS that answers everything with an error from now on; what it has not yet written of its
    log is lost."""
    root = os.open(drive, os.O_RDONLY)
    fcntl.ioctl(root, _XFS_IOC_GOINGDOWN, struct.pack("I", _WITHOUT_LOG))
    os.close(root)


def fill(file: IO[bytes]) -> None:
    """To the last block: ends with an OSError."""
    while True:
        file.write(bytes(4096))
