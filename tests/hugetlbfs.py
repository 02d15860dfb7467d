"""Huge pages for tests and benchmarks: reserved, mounted somewhere of their own, given back."""

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
_CGROUPS = Path("/sys/fs/cgroup")
_LOCK = Path(tempfile.gettempdir()) / "keepstep-hugepages.lock"
_TURN = Path(tempfile.gettempdir()) / "keepstep-hugepages.turn"


class Unavailable(RuntimeError):
    """This machine gives none, and why."""


@contextlib.contextmanager
def or_skip() -> Iterator[None]:
    """What is said of a test, and of a machine."""
    try:
        yield
    except Unavailable as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """One test at a time: the pages of one that ends may be free only after their number was taken
    back, and until then others' are fewer."""
    with _TURN.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def reserved(count: int) -> Iterator[None]:
    """So many pages more than there were. Raises Unavailable."""
    if not _POOL.exists() or os.geteuid():
        raise Unavailable("huge pages need root, and a kernel that has them")
    _add(count)
    try:
        if _pages("free_hugepages") < count:
            raise Unavailable(f"this machine's memory gives no {count} huge pages now")
        yield
    finally:
        _add(-count)


@contextlib.contextmanager
def mounted(directory: Path, *, size_bytes: int | None = None) -> Iterator[Path]:
    """hugetlbfs there; `size_bytes`: no more of it, whatever is free. Raises Unavailable where
    nothing may be mounted."""
    directory.mkdir(exist_ok=True)
    options = "pagesize=2M" + (f",size={size_bytes}" if size_bytes else "")
    mount = ["mount", "-t", "hugetlbfs", "-o", options, "none", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"hugetlbfs cannot be mounted here: {done.stderr}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextlib.contextmanager
def for_test(directory: Path, count: int, *, size_bytes: int | None = None) -> Iterator[Path]:
    """So many pages for one test, mounted there; skips it where there are none."""
    with (
        or_skip(),
        turn(),
        reserved(count),
        mounted(directory, size_bytes=size_bytes) as place,
    ):
        yield place


def require_limits() -> None:
    """Have the kernel limit containers in huge pages, as kubelets expect it: where nobody mounted
    that controller (cgroup v1), mount it. Raises Unavailable."""
    if (_CGROUPS / "cgroup.controllers").exists() or os.path.ismount(_CGROUPS / "hugetlb"):
        return
    (_CGROUPS / "hugetlb").mkdir(exist_ok=True)
    mount = ["mount", "-t", "cgroup", "-o", "hugetlb", "hugetlb", str(_CGROUPS / "hugetlb")]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"no cgroup controller of huge pages: {done.stderr}")


def _pages(which: str) -> int:
    return int((_POOL / which).read_text())


def _add(count: int) -> None:
    """Tests run side by side."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (_POOL / "nr_hugepages").write_text(str(max(0, _pages("nr_hugepages") + count)))
