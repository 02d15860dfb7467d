"""The same figures on huge pages: `python -m bench --huge-pages` reserves them while it runs.

Slots, and what the floors write from and read into, are of 2 MiB pages then. Needs root.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.image import HUGE_PAGE_BYTES
from tests import hugetlbfs

_VARIABLE = "KEEPSTEP_BENCH_HUGETLBFS"
_SLOTS = 6
"""Of the largest image: two more than a rank has by default, for the floors beside it."""


@contextmanager
def reserved(size_bytes: int, directory: Path) -> Iterator[None]:
    """For all that one worker needs at a time. Raises RuntimeError where there are too few."""
    count = _SLOTS * (size_bytes // HUGE_PAGE_BYTES + 16)
    with hugetlbfs.reserved(count), hugetlbfs.mounted(directory) as mount:
        os.environ[_VARIABLE] = str(mount)
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def mount() -> Path | None:
    """Where they are, None without."""
    found = os.environ.get(_VARIABLE)
    return Path(found) if found else None


def memory(size_bytes: int) -> mmap.mmap | None:
    """So many bytes of them, up to whole pages; None without."""
    if (there := mount()) is None:
        return None
    path = there / f"floor-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        whole = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        os.ftruncate(file.fileno(), whole)
        return mmap.mmap(file.fileno(), whole)


def clean() -> None:
    """Give back what a worker left that was killed."""
    if (there := mount()) is not None:
        for path in sorted(there.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
