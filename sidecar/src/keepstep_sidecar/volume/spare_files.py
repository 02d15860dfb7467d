"""Shards of retired steps, kept to be written over by the next images (docs/adr/0015).

Writing over blocks that a file has already is faster than writing a new file: the file system has
none to find, and the drive none to make anew. A spare file lies in `spare/`, where no reader looks.
All that is known of it is what lies there. Where anything is in doubt, a new file is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.direct_io import aligned_buffer
from keepstep_sidecar.volume.directories import Directories
from keepstep_sidecar.volume.filesystem import PAGE_BYTES, Filesystem
from keepstep_sidecar.volume.paths import Tree


class SpareFiles:
    """The spare files of one volume, by the name of their shard: a rank's next image is most likely
    of the same size."""

    def __init__(self, tree: Tree, directories: Directories, filesystem: Filesystem) -> None:
        self._tree = tree
        self._directories = directories
        self._filesystem = filesystem

    def disk_bytes(self) -> int:
        """Space that spare files take. It counts as free."""
        return self._directories.disk_bytes(self._tree.spare)

    def keep(self, retired: Sequence[Path]) -> int:
        """Keep the shards in these retired directories, in place of all that was kept before.
        Returns their bytes. A shard stays where it is if less than its size is free: others may
        need that."""
        shards = [path for one in retired for path in self._directories.shards_in(one)]
        kept: dict[str, int] = {}
        with contextlib.suppress(OSError):  # what is not kept will be deleted, as without all this
            self._directories.make(self._tree.spare)
            for path in shards:
                size_bytes = self._directories.disk_bytes(path)
                if self._filesystem.free_bytes(self._tree.root) >= size_bytes:
                    self._filesystem.rename(path, self._tree.spare / path.name)
                    kept[path.name] = size_bytes
        if shards:
            self._delete(besides=kept)
        return sum(kept.values())

    def replace(self, path: Path, fd: int, *, shard: str, size_bytes: int, claimed: Path) -> bool:
        """Put the spare file of this shard in the place of the new, empty file `path`, open as
        `fd`. False if there is none, or if it must not be used. `claimed`: another temporary name.

        It must be of this size, and else like the new file; and nobody may have it open, or have
        another name for it, since its bytes will change. Its seal is gone from the medium before
        they do: a power cut never leaves a seal on other bytes.
        """
        with contextlib.suppress(OSError):  # most often, there is none
            self._filesystem.rename(self._tree.spare / shard, claimed)
            if self._unsealed(claimed, fd, size_bytes):
                self._filesystem.rename(claimed, path)
                return True
        self._directories.discard([claimed])
        return False

    def _unsealed(self, path: Path, new: int, size_bytes: int) -> bool:
        fd = self._filesystem.open(path, os.O_RDWR)
        try:
            found = os.fstat(fd)
            if found.st_size != size_bytes or found.st_nlink > 1:
                return False
            if not (self._filesystem.is_alike(fd, new) and self._filesystem.is_open_only_as(fd)):
                return False
            faults.point("spare.unseal")
            with aligned_buffer(PAGE_BYTES) as zeros, memoryview(zeros) as page:
                self._filesystem.write(fd, page, size_bytes - PAGE_BYTES)
            faults.point("spare.sync")
            self._filesystem.sync_data(fd)
            return True
        finally:
            self._filesystem.close(fd)

    def drop(self) -> bool:
        """Delete all spare files. Returns whether there were any."""
        return self._delete(besides=())

    def _delete(self, *, besides: Collection[str]) -> bool:
        doomed = [p for p in self._directories.entries(self._tree.spare) if p.name not in besides]
        self._directories.discard(doomed)
        return bool(doomed)
