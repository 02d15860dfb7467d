"""The shards of the step that was retired last, kept to be written over (docs/adr/0015).

Writing over blocks that a file already has is faster than writing a new file: the file system has
none to find, and the drive none to make anew. A spare file stays in `retired/`, where no reader
looks, and its seal is gone from the medium before anything else of it changes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.direct_io import aligned_buffer
from keepstep_sidecar.volume.directories import Directories
from keepstep_sidecar.volume.filesystem import PAGE_BYTES, Filesystem


class SpareFiles:
    """The spare files of the volume at `root`, by the name of their shard: a rank's next image is
    most likely of the same size. Every method may raise OSError."""

    def __init__(self, root: Path, directories: Directories, filesystem: Filesystem) -> None:
        self._root = root
        self._directories = directories
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._files: dict[str, tuple[Path, os.stat_result]] = {}
        self._retired: Sequence[Path] = ()

    @property
    def disk_bytes(self) -> int:
        """Space that spare files take. It counts as free: `drop` frees it."""
        return sum(found.st_blocks * 512 for _, found in list(self._files.values()))

    def keep(self, retired: Sequence[Path]) -> int:
        """Keep the shards in these retired directories, and delete all that was kept before.
        Returns the bytes that are free now, or count as free.

        A shard is deleted at once if anybody has it open, or has another name for it: its bytes
        must not change for them. So are all if less than their size is free besides.
        """
        freed = self._directories.disk_bytes(retired)
        with self._lock:
            self._replace(retired)
            if self._filesystem.free_bytes(self._root) >= freed:
                for path in self._directories.shards_of(retired):
                    if not self._spare(path):
                        faults.point("retire.unlink")
                        self._filesystem.unlink(path)
            if not self._files:
                self._replace(())
        return freed

    def take(self, shard: str, size_bytes: int, path: Path) -> bool:
        """Move the spare file of this shard to the temporary name `path`, if there is one of just
        this size."""
        with self._lock:
            spare = self._files.get(shard)
            if spare is None or spare[1].st_size != size_bytes:
                return False
            del self._files[shard]
            try:
                self._filesystem.rename(spare[0], path)
            except FileNotFoundError:  # somebody has removed it
                return False
            return True

    def drop(self) -> None:
        """Delete all spare files."""
        with self._lock:
            self._replace(())

    def _replace(self, retired: Sequence[Path]) -> None:
        self._files.clear()
        before, self._retired = self._retired, retired
        for directory in before:
            self._directories.delete(directory)

    def _spare(self, path: Path) -> bool:
        """Keep this file, unless it is not ours alone to change."""
        try:
            fd = self._filesystem.open(path, os.O_RDWR)
        except PermissionError:
            return False
        try:
            found = os.fstat(fd)
            if found.st_nlink > 1 or found.st_size < PAGE_BYTES:
                return False
            if not self._filesystem.is_open_here_only(fd):
                return False
            faults.point("retire.unseal")
            with aligned_buffer(PAGE_BYTES) as zeros, memoryview(zeros) as page:
                self._filesystem.write(fd, page, found.st_size - PAGE_BYTES)
            faults.point("retire.unseal-sync")
            self._filesystem.sync_data(fd)
        finally:
            self._filesystem.close(fd)
        self._files[path.name] = path, found
        return True
