"""Puts a shard into the archive, piece by piece, and then the record of a step.

Sending twice does no harm: what is already there and is the same is left alone, so every sidecar
may try, and try again. A different image that is already there is never replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import mmap
import time
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from keepstep.core.shard import Shard
from keepstep.errors import ForeignError, ImageError, StorageError
from keepstep.image import PAGE_BYTES, ControlPage, TensorRole
from keepstep.image.control_page import Manifest
from keepstep.image.layout import CHUNK_BYTES
from keepstep.steps import Epoch, StepId, merge_epochs
from keepstep_sidecar.concurrency import gather_limited, run_blocking
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.archive import step_record as records
from keepstep_sidecar.tiers.archive.archive_source import control_page, read_image_size
from keepstep_sidecar.tiers.archive.index import (
    archive_source_of,
    make_shard_of_one_object,
    step_prefix,
)
from keepstep_sidecar.tiers.archive.step_record import (
    ListedRankFile,
    StepRecord,
    TwinDelta,
    find_pieces_not_in_base,
    is_worth_a_delta,
    piece_count,
    twin_delta_name,
)
from keepstep_sidecar.tiers.archive.step_record import choose_file_per_rank as found_in
from keepstep_sidecar.tiers.archive.store import Store, StoredObject
from keepstep_sidecar.tiers.remote_tier import RemoteShard
from keepstep_sidecar.tiers.source import ReadCancellation, ShardSource, file_source
from keepstep_sidecar.tiers.verified_chunks import OpenSource
from keepstep_sidecar.volume.files import IoMode, aligned_buffer
from keepstep_sidecar.volume.run_tree import LocalShard, ShardName

PARTS = 4
"""How many parts are in flight at once, 8 MiB each."""

FEWEST_PIECES = 4
"""Smaller images save almost nothing: first and last piece are always the rank's own."""

_THREADS = 3
_SLOW_BYTES_S = 50e6
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0


@dataclass(kw_only=True)
class ArchiveSender:
    """Sends shards and records of one run. `patience_s`: how long to wait for a twin's file of a
    few bytes. `until`: the monotonic time at which the pod must end."""

    store: Store
    run: str
    patience_s: float = 30.0
    until: float = math.inf
    executor: Executor = field(
        default_factory=lambda: ThreadPoolExecutor(_THREADS, thread_name_prefix="keepstep-archive")
    )

    def close(self) -> None:
        """Give up what is being read."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _patience_s(self, size_bytes: int) -> float:
        """How long to wait for a twin's file of this size: as long as a slow store may take. When
        the pod must end, at most a third of its remaining time."""
        left_s = max(0.0, self.until - time.monotonic())
        return min(self.patience_s + size_bytes / _SLOW_BYTES_S, left_s / 3)

    async def send(self, found: LocalShard, *, bases: Iterable[str] = ()) -> int | None:
        """Put a shard into the archive, its base first, and check that it has arrived. Returns the
        bytes that were sent, None when it was already there. `bases`: objects that are its base, as
        far as is known.

        Raises Gone when the shard is no longer here, Unreadable or DigestError when it is damaged
        here, ForeignError when another image has its place, StorageError.
        """
        at_rest = file_source(found, run=self.run, engine=IoMode.DIRECT)
        name, base_bytes = ShardName.of(found), 0
        if at_rest.beside is not None:
            base_bytes = await self._send(at_rest.beside, name.base_shard_name, like=bases) or 0
        sent_bytes = await self._send(at_rest, name)
        return None if sent_bytes is None else base_bytes + sent_bytes

    async def _send(
        self, at_rest: ShardSource, name: ShardName, *, like: Iterable[str] = ()
    ) -> int | None:
        prefix = step_prefix(self.run, name.id)
        with contextlib.ExitStack() as stack:
            entering = functools.partial(
                stack.enter_context, verified_chunks.open_verified(at_rest)
            )
            shard = await run_blocking(self.executor, entering)
            all_of_it = ArchiveFile(f"{prefix}/{name.file}", shard)
            if await self._there(all_of_it):
                return None
            if await self._copied(all_of_it, like):
                return 0
            file = await self._difference(prefix, name, shard) or all_of_it
            if file is not all_of_it and await self._there(file):
                return None
            part_bytes = _part_bytes(shard.manifest)
            given = read_pieces(shard, file.pieces, parts=PARTS, executor=self.executor)
            try:
                await self.store.upload(file.name, given, part_bytes=part_bytes, parts=PARTS)
            finally:
                await given.aclose()
            await self._check(file)
            return file.size_bytes

    async def _copied(self, file: ArchiveFile, like: Iterable[str]) -> bool:
        """Whether the file could be made from an object of the archive, without sending it."""
        for other in like:
            with contextlib.suppress(StorageError, ForeignError):  # it was retired just now
                there = await self._there(replace(file, name=other))
                if there and await self.store.copy(other, file.name):
                    return await self._there(file)
        return False

    async def _difference(
        self, prefix: str, name: ShardName, shard: OpenSource
    ) -> ArchiveFile | None:
        """The shard as its difference from the file of its first twin; None without such a file or
        if that saves too little."""
        image = shard.manifest.shard
        first = min((image.rank, *image.alike))
        if first == image.rank or piece_count(shard.manifest) < FEWEST_PIECES:
            return None
        twin = f"{prefix}/{replace(name, rank=first).file}"
        stored = await self._awaited(twin, image.size_bytes)
        if stored is None:
            info("archive.shard_uploaded_whole", step=str(name.id), rank=name.rank,
                reason=f"the equal shard of rank {first} is not in the archive")  # fmt: skip
            return None
        rest = Shard(step_id=image.step_id, rank=first, world=image.world, size_bytes=stored.bytes)
        try:
            theirs = await self._manifest(make_shard_of_one_object(rest, stored))
        except ImageError as error:
            warn(
                "archive.shard_uploaded_whole", step=str(name.id), rank=name.rank, reason=str(error)
            )
            return None
        own = find_pieces_not_in_base(shard.manifest, theirs)
        if not is_worth_a_delta(shard.manifest, own):
            return None
        return ArchiveFile(
            f"{prefix}/{twin_delta_name(image.rank, image.world, first, is_base=name.is_base)}",
            shard,
            tuple(own),
        )

    async def _manifest(self, shard: RemoteShard) -> Manifest:
        at = archive_source_of(self.store, shard, run=self.run)

        def read(cancel: ReadCancellation) -> Manifest:
            with verified_chunks.open_verified(at, cancel) as there:
                return there.manifest

        return await verified_chunks.run_cancellable(self.executor, read)

    async def _awaited(self, name: str, size_bytes: int) -> StoredObject | None:
        """The object, once its sender has sent it; None if that takes too long."""
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while (stored := await self.store.find_object(name)) is None:
            left_s = self._patience_s(size_bytes) - (time.monotonic() - began)
            if left_s <= 0:
                break
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return stored

    async def _there(self, file: ArchiveFile) -> bool:
        """Whether the very same shard is in the archive. A damaged one of ours may be replaced."""
        stored = await self.store.find_object(file.name)
        if stored is None or stored.bytes < PAGE_BYTES:
            return False
        page = await self._read(file.name, stored.bytes - PAGE_BYTES, PAGE_BYTES)
        try:
            control = ControlPage.from_bytes(page)
        except ImageError:
            return False
        theirs = (control.run, control.step_id, control.rank, control.root)
        ours = file.shard.manifest.control
        if theirs != (ours.run, ours.step_id, ours.rank, ours.root):
            raise ForeignError(
                f"step {control.step_id}, rank {control.rank} of run {control.run!r} with root"
                f" {control.root} is there already, unlike {file.shard.source.where}"
                f" (root {ours.root}): two writers of one run; give one of them another archive or"
                " another name",
                path=f"{self.store.where}/{file.name}",
            )
        return stored.bytes == file.size_bytes

    async def _check(self, file: ArchiveFile) -> None:
        """Check that the object has the right length and ends with our digests."""
        name, size = file.name, file.size_bytes
        stored = await self.store.find_object(name)
        if stored is None or stored.bytes != size:
            found = "nothing" if stored is None else f"{stored.bytes} bytes"
            raise StorageError(
                f"{self.store.where}/{name}: sent {size} bytes, found {found}; it is sent again"
            )
        closing = file.shard.manifest.closing
        if await self._read(name, size - len(closing), len(closing)) != closing:
            raise StorageError(
                f"{self.store.where}/{name}: the archive gives back other bytes than it was sent;"
                " it is sent again"
            )

    async def _read(self, name: str, begin: int, size: int) -> bytes:
        buffer = bytearray(size)
        await self.store.read_range(name, begin, memoryview(buffer))
        return bytes(buffer)

    # --- the record --------------------------------------------------------------------------

    async def write_step_record(
        self, step_id: StepId, *, world: int, epochs: Iterable[Epoch]
    ) -> bool:
        """Write the step's record, or check it, once the shards of all ranks are there. Returns
        False before that.

        Raises ForeignError when another writer archived other shards as this step, ImageError when
        a file is not what its name says, StorageError.
        """
        prefix = step_prefix(self.run, step_id)
        listed = await self.store.list_below(prefix)
        files = {entry.name.rpartition("/")[2]: entry for entry in listed}
        if records.NAME in files:
            await self._compare(step_id, files)
            return True
        there, bases = (found_in(files, world=world, is_base=is_base) for is_base in (False, True))
        if len(there) < world:
            return False
        shards = await self._described(step_id, world, there)
        if any(shard.base is not None and shard.rank not in bases for shard, _ in shards):
            return False
        await self._check_bases(
            [shard.base for shard, _ in shards if shard.base is not None], bases
        )
        record = StepRecord(
            run=self.run,
            id=step_id,
            world=world,
            epochs=merge_epochs((*(epoch for _, epoch in shards), *epochs)),
            shards=tuple(shard for shard, _ in shards),
            written_at=time.time(),
            twins=_twins(there),
            base_twins=_twins(bases),
        )
        if not await self.store.create_if_absent(f"{prefix}/{records.NAME}", record.to_json()):
            await self._agree(record)
        return True

    async def _described(
        self, step_id: StepId, world: int, there: Mapping[int, ListedRankFile]
    ) -> list[tuple[Shard, Epoch]]:
        """The shards as their own control pages describe them. All must be of this step and run."""

        async def describe(rank: int) -> tuple[Shard, Epoch]:
            file = there[rank]
            differs = file.of is not None
            size_bytes = (
                await read_image_size(self.store, file.stored) if differs else file.stored.bytes
            )
            shard = Shard(step_id=step_id, rank=rank, world=world, size_bytes=size_bytes)
            control = await control_page(self.store, file.stored, shard, run=self.run)
            params = (control.sections or {}).get(TensorRole.PARAMS.value)
            described = replace(
                shard, root=control.root, params_digest=params, base=control.base_shard
            )
            return described, control.epoch

        asked = [functools.partial(describe, rank) for rank in range(world)]
        return await gather_limited(asked, most=16)

    async def _check_bases(
        self, bases: Sequence[Shard], there: Mapping[int, ListedRankFile]
    ) -> None:
        """Check that these are the bases to which the shards refer."""

        async def check(base: Shard) -> None:
            stored = there[base.rank].stored
            control = await control_page(self.store, stored, base, run=self.run)
            if control.root != base.root:
                raise ForeignError(
                    f"has the root {control.root}, but rank {base.rank} refers to {base.root}",
                    path=f"{self.store.where}/{stored.name}",
                )

        await gather_limited([functools.partial(check, base) for base in bases], most=16)

    async def _compare(self, step_id: StepId, files: dict[str, StoredObject]) -> None:
        record = await self._record(step_id, files[records.NAME].bytes)
        sizes = record.files
        wrong = [at for at, size in sizes.items() if at not in files or files[at].bytes != size]
        if wrong:
            raise ForeignError(
                f"names {wrong[0]} with {sizes[wrong[0]]} bytes, which is not there",
                path=f"{self.store.where}/{step_prefix(self.run, step_id)}/{records.NAME}",
            )

    async def _agree(self, ours: StepRecord) -> None:
        """Another writer was quicker. Its record must have the same content."""
        name = f"{step_prefix(self.run, ours.id)}/{records.NAME}"
        stored = await self.store.find_object(name)
        theirs = await self._record(ours.id, stored.bytes if stored else 0)
        if not theirs.has_same_content(ours):
            raise ForeignError(
                f"another writer archived other shards as step {ours.id} of run {self.run!r};"
                " give one of the two runs another archive or another name",
                path=f"{self.store.where}/{name}",
            )

    async def _record(self, step_id: StepId, size: int) -> StepRecord:
        name = f"{step_prefix(self.run, step_id)}/{records.NAME}"
        data = await self._read(name, 0, min(size, records.LIMIT_BYTES))
        path = f"{self.store.where}/{name}"
        return await run_blocking(None, lambda: StepRecord.from_json(data, path=path))


def _twins(there: Mapping[int, ListedRankFile]) -> dict[int, TwinDelta]:
    return {
        rank: TwinDelta(rank=file.of, stored_bytes=file.stored.bytes)
        for rank, file in there.items()
        if file.of is not None
    }


# --- pieces of a shard -----------------------------------------------------------------------
#
# The file is read with O_DIRECT and not mapped: a mapped page that the drive cannot read ends the
# process (SIGBUS), and a mapping would take gigabytes of page cache from the training. The drive
# writes into the buffer that the network reads from, so nothing is copied in between. A piece that
# does not fit its digest is not sent: an archive must not keep damaged bytes as if they were good.


MOST_PARTS = 9000
"""S3 allows 10,000 parts for an object."""


def _part_bytes(manifest: Manifest) -> int:
    """The size of a part: whole chunks, so that an object of this size has few enough parts."""
    return -(-piece_count(manifest) // MOST_PARTS) * CHUNK_BYTES


def _read_piece(shard: OpenSource, index: int, into: memoryview) -> None:
    """Fill `into` with the bytes from this chunk on. Raises ImageError, StorageError."""
    manifest = shard.manifest
    begin, end = manifest.bounds_of_chunk(index)
    size_bytes = max(0, end - begin)
    if size_bytes:
        with into[:size_bytes] as chunk:
            for _ in shard.read([(index, chunk)]):
                pass
    behind = begin + size_bytes - manifest.layout.digests_begin
    into[size_bytes:] = manifest.closing[behind : behind + len(into) - size_bytes]


@dataclass(frozen=True)
class ArchiveFile:
    """What becomes an object: some pieces of a shard in order; `own` None for all of them."""

    name: str
    shard: OpenSource
    own: tuple[int, ...] | None = None

    @property
    def pieces(self) -> Sequence[int]:
        return range(piece_count(self.shard.manifest)) if self.own is None else self.own

    @property
    def size_bytes(self) -> int:
        """The size of the object. All pieces except the last are full."""
        cut_off = piece_count(self.shard.manifest) - len(self.pieces)
        return self.shard.manifest.layout.size_bytes - cut_off * CHUNK_BYTES


class PieceBuffers:
    """At most `count` page-aligned buffers of one chunk. A buffer is free again when nothing refers
    to its view any more; a thread of the network library may hold one."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = [aligned_buffer(size_bytes) for _ in range(count)]
        self._freed = asyncio.Event()

    async def take(self, size_bytes: int) -> memoryview:
        """The first `size_bytes` of a free buffer. Waits until there is one."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        buffer = self._free.pop()
        view = memoryview(buffer)[:size_bytes]
        weakref.finalize(view, self._dropped, buffer).atexit = False
        return view

    def _dropped(self, buffer: mmap.mmap) -> None:
        with contextlib.suppress(RuntimeError):
            # the loop has ended: the buffer is not needed any more
            self._loop.call_soon_threadsafe(self._back, buffer)

    def _back(self, buffer: mmap.mmap) -> None:
        self._free.append(buffer)
        self._freed.set()


async def read_pieces(
    shard: OpenSource, numbers: Sequence[int], *, parts: int, executor: Executor
) -> AsyncGenerator[memoryview, None]:
    """Yield these pieces of the file in order. `parts`: how many the receiver keeps in flight.

    Raises ImageError, StorageError. The pieces before the error must then not become an object.
    """
    size = shard.manifest.layout.size_bytes
    count = min((parts + 1) * (_part_bytes(shard.manifest) // CHUNK_BYTES) + 1, len(numbers))
    buffers = PieceBuffers(count, min(CHUNK_BYTES, size))

    async def read(index: int) -> memoryview:
        view = await buffers.take(min(CHUNK_BYTES, size - index * CHUNK_BYTES))
        await run_blocking(executor, lambda: _read_piece(shard, index, view))
        return view

    ahead = asyncio.ensure_future(read(numbers[0]))  # the drive works while the network does
    try:
        for following in (*numbers[1:], None):
            view = await ahead
            if following is not None:
                ahead = asyncio.ensure_future(read(following))
            yield view
            del view  # else this frame would hold a buffer while it waits for a free one
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)
