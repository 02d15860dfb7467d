"""A committed step's directory: every shard of one step, checked before a byte of it is believed.

Stock DCP leaves rows silently untouched when a shard is missing, and joins whatever it finds. So
this refuses a directory that is not exactly one step of one run by one world, and names the file.
The seal and the layout's id vouch for headers; ranges of tensors are verified by the digest table,
each chunk once, before anything is handed out.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from keepstep.dcp.metadata import Contents, Part, Stored, Tree, dtype_of
from keepstep.errors import (
    ForeignError,
    FormatError,
    MismatchError,
    RestoreError,
    StorageError,
    TornError,
)
from keepstep.image import (
    ControlPage,
    Layout,
    check_chunk,
    check_table,
    chunk_bounds,
    extras,
    read_control,
    read_layout,
)
from keepstep.image.xxh3 import CHUNK_BYTES, HAVE_FAST
from keepstep.steps import StepId, shard_name

_SUFFIX = ".safetensors"
_THREADS = 4


@dataclass(eq=False)
class Shard:
    """One rank's image at rest. Mapped when it is first read; the mapping is private."""

    path: Path
    layout: Layout
    control: ControlPage
    tree: Tree
    _verified: set[int] = field(default_factory=set)
    _mapping: mmap.mmap | None = None
    _values: dict[str, bytes] | None = None

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Read header and seal. Raises ImageError, StorageError; each names the file."""
        try:
            layout = read_layout(path)
            control = read_control(path, layout)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error}); use another copy") from error
        if control.root is None:
            raise TornError("it has no digests: it was never written to the end", path=path)
        return cls(path, layout, control, Tree.parse(layout.skeleton))

    def chunks(self, begin: int, end: int) -> Iterator[int]:
        """Numbers of the chunks that hold `[begin, end)` and were not verified yet."""
        numbers = range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)) if begin < end else ()
        return (one for one in numbers if one not in self._verified)

    def verify(self, chunk: int) -> None:
        """Digest one chunk. Raises DigestError that names its tensors and the file."""
        if chunk in self._verified:
            return
        view, layout = self._view(), self.layout
        table = view[layout.digests_begin : layout.control_begin]
        if not self._verified:
            check_table(self.control, layout, table, path=self.path)
        begin, end = chunk_bounds(layout, chunk)
        check_chunk(layout, chunk, view[begin:end], table, path=self.path)
        self._verified.add(chunk)

    def boxes(self) -> Iterator[tuple[str, Stored]]:
        """All of them, under the names of their entries."""
        for name, entry in self.layout.entries.items():
            spec = entry.spec
            shape = spec.shape if spec.global_shape is None else spec.global_shape
            yield (
                name,
                Stored(
                    rank=self.layout.rank,
                    begin=entry.begin,
                    end=entry.end,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    offsets=spec.offsets or (0,) * len(shape),
                    global_shape=shape,
                ),
            )

    def tensor(self, stored: Stored) -> Tensor:
        """The stored box over the mapped bytes, which `verify` has seen. To be read only."""
        dtype = dtype_of(stored, self.path)
        if stored.begin == stored.end:
            return torch.empty(stored.shape, dtype=dtype)
        count = stored.end - stored.begin
        flat = torch.frombuffer(self._map(), dtype=torch.uint8, count=count, offset=stored.begin)
        return flat.view(dtype).view(stored.shape)

    def value(self, name: str) -> bytes:
        """What the planner saved under this name that is no tensor. Raises ImageError."""
        if self._values is None:
            begin = self.layout.extras_begin
            end = begin + self.control.extras_bytes
            for chunk in list(self.chunks(begin, end)):
                self.verify(chunk)
            tree = extras.decode(self._view()[begin:end])
            values = tree.get("dcp") if isinstance(tree, dict) else None
            self._values = values if isinstance(values, dict) else {}
        value = self._values.get(name)
        if not isinstance(value, bytes):
            raise FormatError(f"{name}: the header names it, the extras lack it", path=self.path)
        return value

    def _map(self) -> mmap.mmap:
        if self._mapping is None:
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StorageError(f"{self.path}: it is gone ({error}); load again") from error
            try:
                # copy on write, as torch wants memory that it could write to
                self._mapping = mmap.mmap(fd, self.layout.size_bytes, access=mmap.ACCESS_COPY)
            finally:
                os.close(fd)
        return self._mapping

    def _view(self) -> memoryview:
        return memoryview(self._map())


@dataclass(frozen=True, kw_only=True, eq=False)
class Folder:
    """One committed step; `shards` in rank order."""

    path: Path
    id: StepId
    run: str
    shards: tuple[Shard, ...]

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Read all headers and seals.

        Raises RestoreError for a directory without a step or with an incomplete one, ImageError
        for a file that is no shard, ForeignError for one of another step, epoch, run or world.
        """
        try:
            files = sorted(one for one in path.iterdir() if one.name.endswith(_SUFFIX))
        except OSError as error:
            raise RestoreError(f"{path}: no directory of a step ({error})") from error
        if not files:
            raise RestoreError(f"{path}: no shard in it; name the directory of a committed step")
        shards = sorted(map(Shard.open, files), key=lambda one: one.layout.rank)
        first = shards[0]
        for shard in shards:
            _check_alike(shard, first)
        _check_complete(path, shards)
        return cls(path=path, id=first.control.id, run=first.control.run, shards=tuple(shards))

    def contents(self) -> Contents:
        """All that is in it. Raises CoverageError, see `Contents.of`."""
        aliases: dict[str, str] = {}
        for shard in self.shards:
            aliases |= shard.layout.aliases
        return Contents.of(
            [Part(rank=one.layout.rank, tree=one.tree, boxes=one.boxes()) for one in self.shards],
            where=str(self.path),
            id=self.id,
            world=len(self.shards),
            aliases=aliases,
        )


def verify(ranges: Iterable[tuple[Shard, int, int]]) -> None:
    """Digest all chunks of these ranges `[begin, end)` that were not yet. Raises DigestError."""
    wanted = {(shard, chunk) for shard, begin, end in ranges for chunk in shard.chunks(begin, end)}
    ordered = sorted(wanted, key=lambda one: (one[0].layout.rank, one[1]))
    threads = min(_THREADS, len(os.sched_getaffinity(0)), max(1, len(ordered)))
    with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-verify") as pool:
        for _ in pool.map(lambda one: one[0].verify(one[1]), ordered):
            pass


def _check_alike(shard: Shard, first: Shard) -> None:
    one, other = shard.control, first.control
    for what, found, wanted in (
        ("run", one.run, other.run),
        ("step", one.id, other.id),
        ("world", one.world, other.world),
    ):
        if found != wanted:
            raise ForeignError(
                f"the shard of {what} {found} among those of {wanted} ({first.path.name}):"
                " take it out of this directory",
                path=shard.path,
            )
    if shard is not first and one.rank == other.rank:
        raise ForeignError(f"rank {one.rank} is there twice, see {first.path}", path=shard.path)
    name = shard_name(one.rank, one.world)
    if shard.path.name != name:
        raise ForeignError(f"it is the shard {name}: give it that name", path=shard.path)


def _check_complete(path: Path, shards: list[Shard]) -> None:
    world, ranks = shards[0].layout.world, {one.layout.rank for one in shards}
    missing = [shard_name(rank, world) for rank in range(world) if rank not in ranks]
    if missing:
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if missing[4:] else "")
        raise RestoreError(
            f"{path}: step {shards[0].control.id} is incomplete, {named} missing: bring it back,"
            " or load another step"
        )


# --- reading ---------------------------------------------------------------------------------
#
# A step in a directory, for `StorageReader(path)`: the exit door, which needs no sidecar.
#
# Every chunk that any rank needs is digested before any rank loads anything; the files are
# mapped, and nothing is held beside the tensors.


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
