"""The one loop that moves chunks: from any source into a slot, into frames, or to a function.

Nothing is trusted. The root is checked against what was promised, the digest table against the
root, and each chunk against the table. All functions block; `run_cancellable` is for the event
loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from keepstep.errors import ForeignError, FormatError, UsageError
from keepstep.image import PAGE_BYTES, ControlPage
from keepstep.image.control_page import Manifest
from keepstep.image.layout import CHUNK_BYTES
from keepstep_sidecar.concurrency import for_each_chunk, run_blocking
from keepstep_sidecar.tiers.source import Read, ReadCancellation, ShardSource
from keepstep_sidecar.volume.files import aligned_buffer, fault_point, make_hashing_semaphore

T = TypeVar("T")

ChunkViews = Sequence[tuple[int, memoryview]]
"""Chunk numbers, each with a page-aligned buffer of exactly its bytes."""

_PIECE_BYTES = 1 << 20
_MANIFESTS_KEPT = 256
_BUFFERS = 4


@dataclass(frozen=True, kw_only=True)
class OpenSource:
    """A source and its manifest, for as long as the source is read."""

    source: ShardSource
    manifest: Manifest
    fetch: Read
    turn: threading.Semaphore = field(default_factory=make_hashing_semaphore)

    def read(self, chunks: ChunkViews) -> Iterator[tuple[int, memoryview]]:
        """Fill the buffers of consecutive chunks, and yield each once it is verified."""
        begin = self.manifest.bounds_of_chunk(chunks[0][0])[0]
        views = self.fetch(begin, [view for _, view in chunks])
        for (chunk, _), view in zip(chunks, views, strict=True):
            with self.turn:
                self.manifest.verify_chunk(chunk, view, path=self.source.where)
            yield chunk, view


class Manifests:
    """The manifests read last. Clients that read single chunks need them again and again."""

    def __init__(self) -> None:
        self._known: dict[ShardSource, Manifest] = {}
        self._lock = threading.Lock()

    def get_cached_manifest(self, source: ShardSource) -> Manifest | None:
        """The manifest if it was read before; does not ask the source."""
        return self._known.get(source)

    def read(self, source: ShardSource, fetch: Read) -> Manifest:
        if (manifest := self.get_cached_manifest(source)) is None:
            manifest = Manifest.read(
                lambda begin, end: _bytes(fetch, begin, end),
                source.shard.size_bytes,
                run=source.run,
                shard=source.shard,
                path=source.where,
            )
            _check_beside(source, manifest)
            with self._lock:
                while len(self._known) >= _MANIFESTS_KEPT:
                    del self._known[next(iter(self._known))]
                self._known[source] = manifest
        return manifest

    def forget(self, source: ShardSource) -> None:
        with self._lock:
            self._known.pop(source, None)


def _check_beside(source: ShardSource, manifest: Manifest) -> None:
    """Raises ForeignError if what lies beside the shard is not the base that it refers to."""
    if source.beside is None:
        return
    beside, named = source.beside.shard, manifest.control.base_shard
    if named is None or any(
        getattr(named, name) not in (None, getattr(beside, name))
        for name in ("step_id", "rank", "world", "size_bytes", "root")
    ):
        raise ForeignError(
            f"it refers to another base than {source.beside.where}", path=source.where
        )


def _bytes(fetch: Read, begin: int, end: int) -> bytes:
    """Allocate memory as bytes arrive, not as they are announced: in pieces that grow."""
    data, size = bytearray(), _PIECE_BYTES
    while (at := begin + len(data)) < end:
        size = min(size, end - at)
        with aligned_buffer(size) as buffer, memoryview(buffer) as view:
            for piece in fetch(at, [view]):
                data += piece
        size *= 2
    return bytes(data)


@contextmanager
def open_verified(
    source: ShardSource, cancel: ReadCancellation | None = None, manifests: Manifests | None = None
) -> Iterator[OpenSource]:
    """Open `source`. Raises StorageError, ImageError; errors of the copy are raised inside."""
    manifests = manifests or Manifests()
    try:
        with source.opened(cancel or ReadCancellation()) as fetch:
            manifest = manifests.read(source, fetch)
            yield OpenSource(source=source, manifest=manifest, fetch=fetch)
    except BaseException:
        manifests.forget(source)
        raise


# --- into buffers ----------------------------------------------------------------------------


def fill_buffers(open_source: OpenSource, chunks: ChunkViews) -> None:
    """Fill every buffer. When this returns or raises, no thread touches the buffers any more."""
    _check_sizes(open_source.manifest, chunks)
    runs = list(_runs(chunks, open_source.source.chunks_per_read))

    def fill_run(index: int) -> None:
        for _ in open_source.read(runs[index]):
            pass

    for_each_chunk(fill_run, len(runs), threads=open_source.source.streams)


def load_image(
    source: ShardSource,
    view: memoryview,
    *,
    cancel: ReadCancellation | None = None,
    manifests: Manifests | None = None,
) -> ControlPage:
    """Load the whole image into the page-aligned slot `view`, verified, the seal last. After an
    error the slot holds no seal. Raises StorageError, ImageError."""
    view[-PAGE_BYTES:] = bytes(PAGE_BYTES)
    with open_verified(source, cancel, manifests) as open_source:
        return _load(open_source, view)


def _load(open_source: OpenSource, view: memoryview) -> ControlPage:
    manifest, source = open_source.manifest, open_source.source
    layout, control = manifest.layout, manifest.control
    if len(view) != layout.size_bytes:
        raise UsageError(f"{source.where}: a slot of {len(view)} bytes, not {layout.size_bytes}")
    pieces = [view[slice(*manifest.bounds_of_chunk(chunk))] for chunk in manifest.chunk_indices]
    try:
        fill_buffers(open_source, list(enumerate(pieces)))
    finally:
        for piece in pieces:
            piece.release()
    if bytes(view[: len(layout.header)]) != layout.header:
        raise ForeignError("the header is not that of before", path=source.where)
    if source.adopted_by:
        control = replace(control, run=source.adopted_by)
    view[layout.digests_begin : layout.control_begin] = manifest.table
    fault_point("load.control")
    view[layout.control_begin :] = control.to_bytes() if source.adopted_by else manifest.page
    return control


def _check_sizes(manifest: Manifest, chunks: ChunkViews) -> None:
    for chunk, into in chunks:
        if chunk not in manifest.chunk_indices:
            raise FormatError(f"chunk {chunk} of {len(manifest.chunk_indices)}")
        begin, end = manifest.bounds_of_chunk(chunk)
        if len(into) != end - begin:
            raise UsageError(f"chunk {chunk}: a buffer of {len(into)} bytes, not {end - begin}")


def _runs(chunks: ChunkViews, most: int) -> Iterator[ChunkViews]:
    """Group consecutive chunks, at most `most` in each group."""
    run: list[tuple[int, memoryview]] = []
    for chunk, view in sorted(chunks, key=lambda pair: pair[0]):
        if run and (chunk != run[-1][0] + 1 or len(run) == most):
            yield run
            run = []
        run.append((chunk, view))
    if run:
        yield run


# --- to whoever takes them -------------------------------------------------------------------


def for_each_verified(
    open_source: OpenSource,
    chunks: Iterable[int],
    use: Callable[[int, memoryview], None],
    *,
    threads: int | None = None,
    niceness: int = 0,
    still: Callable[[int], bool] = lambda chunk: True,
) -> None:
    """Call `use(chunk, data)` for each chunk, verified, on `threads` threads (None: as many as the
    source is worth, but few). Each thread needs memory for one chunk. After `use` returns, `data`
    is reused for another chunk. `still`: whether a chunk is still wanted; called just before the
    chunk is read."""
    numbers, own = list(chunks), threading.local()

    def take(index: int) -> None:
        if not still(numbers[index]):
            return
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(aligned_buffer(CHUNK_BYTES))
        begin, end = open_source.manifest.bounds_of_chunk(numbers[index])
        for chunk, data in open_source.read([(numbers[index], own.buffer[: end - begin])]):
            use(chunk, data)

    count = threads or min(open_source.source.streams, _BUFFERS)
    for_each_chunk(take, len(numbers), threads=count, niceness=niceness)


# --- from the event loop ---------------------------------------------------------------------


async def run_cancellable(threads: Executor | None, work: Callable[[ReadCancellation], T]) -> T:
    """Run `work(cancel)` on a thread. If this is cancelled, the reads are ended. It returns only
    after `work` has, so no thread touches the buffers of `work` any more."""
    cancel = ReadCancellation()
    return await run_blocking(threads, lambda: work(cancel), stop=cancel.cancel)
