"""A step in a directory, for `StorageReader(path)`: the exit door, which needs no sidecar.

Every chunk that any rank needs is digested before any rank loads anything; the files are mapped,
and nothing is held beside the tensors.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from keepstep.dcp.folder import Folder, Shard, verify
from keepstep.errors import MismatchError
from keepstep.image.xxh3 import HAVE_FAST

log = logging.getLogger("keepstep")


class Directory:
    """One committed step's directory."""

    def __init__(self, path: Path) -> None:
        """Read all headers. Raises RestoreError, ImageError, CoverageError."""
        self._folder = Folder.open(path)
        self.contents = self._folder.contents()

    def check(self, plan: LoadPlan) -> None:
        """Digest all that the plan reads and was not yet. Raises DigestError."""
        if not HAVE_FAST:
            log.warning("keepstep: without the xxhash package, verifying is very slow")
        verify(self._ranges(plan))

    def load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Copy from the mapped files into the planner's tensors. Raises ImageError."""
        verify(self._ranges(plan))  # again only what a global plan added
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                planner.load_bytes(item, io.BytesIO(self._holder(item).value(name)))
            else:
                self._copy(item, planner)

    def _copy(self, item: ReadItem, planner: LoadPlanner) -> None:
        shard = self._holder(item)
        source = shard.tensor(self.contents.stored(item.storage_index))
        for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, begin, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != source.size():
            raise MismatchError(
                f"{item.storage_index.fqn}: {list(source.size())} in {shard.path},"
                f" {list(target.size())} here"
            )
        target.copy_(source)
        planner.commit_tensor(item, target)

    def _ranges(self, plan: LoadPlan) -> Iterator[tuple[Shard, int, int]]:
        """The bytes that a plan reads, whole rows of the first dimension at least."""
        for item in plan.items:
            shard = self._holder(item)
            if item.type is LoadItemType.BYTE_IO:
                begin = shard.layout.extras_begin
                yield shard, begin, begin + shard.control.extras_bytes
                continue
            stored = self.contents.stored(item.storage_index)
            rows = stored.shape[0] if stored.shape else 1
            row_bytes = (stored.end - stored.begin) // max(rows, 1)
            first, count = (item.storage_offsets[0], item.lengths[0]) if stored.shape else (0, 1)
            begin = stored.begin + first * row_bytes
            yield shard, begin, begin + count * row_bytes

    def _holder(self, item: ReadItem) -> Shard:
        return self._folder.shards[self.contents.holder(item)]
