"""Huge pages, reserved for one worker at a time: `python -m bench --pages huge`.

Slots, and the memory of the floors, are then on pages of 2 MiB. Needs root.
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
"""Images of the largest size for which pages are reserved: a rank's default number of slots, and
two more for the floors."""


@contextmanager
def reserved(size_bytes: int, directory: Path) -> Iterator[None]:
    """Reserve all huge pages that one worker needs, and mount them below `directory`. Raises
    Unavailable if there are too few."""
    count = _SLOTS * (size_bytes // HUGE_PAGE_BYTES + 16)
    with hugetlbfs.reserved(count), hugetlbfs.mounted(directory / "hugetlbfs") as mount:
        os.environ[_VARIABLE] = str(mount)
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def mount() -> Path | None:
    """Where the huge pages are mounted; None if none are reserved."""
    found = os.environ.get(_VARIABLE)
    return Path(found) if found else None


def memory(size_bytes: int) -> mmap.mmap | None:
    """Memory of `size_bytes`, rounded up to whole huge pages; None if none are reserved."""
    if (there := mount()) is None:
        return None
    path = there / f"floor-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        whole = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        os.ftruncate(file.fileno(), whole)
        return mmap.mmap(file.fileno(), whole)


def clean() -> None:
    """Free the huge pages that a killed worker left."""
    if (there := mount()) is not None:
        for path in sorted(there.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
