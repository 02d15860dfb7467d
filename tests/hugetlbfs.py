"""Huge pages for tests: reserved, mounted in a directory of their own, and given back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_LOCK = Path(tempfile.gettempdir()) / "keepstep-tests-hugepages.lock"


def pages(which: str = "nr_hugepages") -> int:
    return int((_POOL / which).read_text())


@contextlib.contextmanager
def reserved(count: int) -> Iterator[None]:
    """So many pages more than there were; skips where that cannot be."""
    if not _POOL.exists() or os.geteuid():
        pytest.skip("huge pages need root, and a kernel that has them")
    _add(count)
    try:
        if pages("free_hugepages") < count:
            pytest.skip(f"this machine's memory gives no {count} huge pages now")
        yield
    finally:
        _add(-count)


@contextlib.contextmanager
def mounted(directory: Path, *, size_bytes: int | None = None) -> Iterator[Path]:
    """hugetlbfs there; `size_bytes`: no more of it, whatever is free. Skips where nothing may be
    mounted."""
    directory.mkdir(exist_ok=True)
    options = "pagesize=2M" + (f",size={size_bytes}" if size_bytes else "")
    mount = ["mount", "-t", "hugetlbfs", "-o", options, "none", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"hugetlbfs cannot be mounted here: {done.stderr}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _add(count: int) -> None:
    """Tests run side by side."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (_POOL / "nr_hugepages").write_text(str(max(0, pages() + count)))
