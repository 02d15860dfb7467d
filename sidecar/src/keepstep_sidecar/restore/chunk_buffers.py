"""Copies verified chunks of saved shards into shared memory that a trainer maps.

A window belongs to one rank's restore. A copy that fails verification is quarantined or refused,
and the chunk is then read from the next place that holds the same image. Chunks that several ranks
have announced are read once for all of them (`shared_reads`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from keepstep.errors import ImageError, NoMemoryError, StorageError
from keepstep.image import Layout, chunk_bounds
from keepstep.image.layout import CHUNK_BYTES
from keepstep.steps import NEAREST_FIRST, StepId, Tier
from keepstep.wire.trainer import (
    RESTORE_TIMEOUT_ENV,
    ChunkBufferRequest,
    ChunkReadRequest,
    ChunksReady,
    ChunksRequest,
    SharedChunkBuffer,
)
from keepstep_sidecar.concurrency import gather_all
from keepstep_sidecar.error_responses import refusal_error
from keepstep_sidecar.leases import Leases
from keepstep_sidecar.memory.slot_file import copy_bytes, populate_pages
from keepstep_sidecar.restore.fetcher import Fetcher
from keepstep_sidecar.restore.shared_reads import SharedChunk, SharedReads
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.source import ShardSource

# --- windows ---------------------------------------------------------------------------------


_PREFIX = "window-"
LEAST_FRAMES = 2
"""One frame is filled while the other is read."""
MOST_FRAMES = 64


class ChunkBuffer:
    """A window: `frames` frames of `CHUNK_BYTES` each, mapped. Make and close it on a thread or on
    the event loop."""

    def __init__(self, path: Path, frames: int) -> None:
        """Blocks while memory is allocated. Raises NoMemoryError when there is too little."""
        self.path = path
        self.frames = frames
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o660)
        try:
            os.posix_fallocate(fd, 0, self.size_bytes)
            self._mapping = mmap.mmap(fd, self.size_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise NoMemoryError(
                f"{path.parent}: no room for a window of {self.size_bytes} bytes"
                f" ({error.strerror}); raise --memory-limit or give the tmpfs more memory",
                code="no-memory",
            ) from error
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)
        populate_pages(self._view, threading.Event())

    @property
    def size_bytes(self) -> int:
        return self.frames * CHUNK_BYTES

    def get_frame_view(self, number: int, size_bytes: int) -> memoryview:
        """The first `size_bytes` of a frame. Raises IndexError when there is no such frame."""
        if not 0 <= number < self.frames:
            raise IndexError(f"frame {number} of a window of {self.frames}")
        begin = number * CHUNK_BYTES
        return self._view[begin : begin + size_bytes]

    def close(self) -> None:
        """Remove the file. Its memory is free once no process maps it any more. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._view.release()
        with contextlib.suppress(BufferError):  # a read still fills a frame and keeps the mapping
            self._mapping.close()


# --- chunks ----------------------------------------------------------------------------------


@dataclass(eq=False)
class ChunkBuffers:
    """`/v1/window` and `/v1/chunks`. `limit_bytes`: for slots and windows together; None for no
    limit. `read_bytes`: bytes read into windows, by the tier that they came from. `shared_bytes`:
    bytes that were copied from another rank's frame instead."""

    fetcher: Fetcher
    leases: Leases
    _: KW_ONLY
    memory_dir: Path
    limit_bytes: int | None
    read_bytes: Counter[Tier] = field(default_factory=Counter)
    shared_bytes: int = 0
    _buffers: dict[int, ChunkBuffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool, self._shared_reads = self.fetcher.pool, SharedReads(self._read)

    def remove_leftover_buffers(self) -> None:
        """Remove windows that an earlier sidecar left. Of a link, only the name is removed."""
        for path in self.memory_dir.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # a directory, which no sidecar made
                path.unlink()

    # --- windows -----------------------------------------------------------------------------

    async def make_window(self, request: ChunkBufferRequest) -> SharedChunkBuffer:
        """Make a new window for this lease, in place of its former one. It has fewer frames when
        memory is short. Raises NoMemoryError, SidecarError `bad-request`."""
        lease = self.leases.require_lease(request.lease)
        if not LEAST_FRAMES <= request.frames <= MOST_FRAMES:
            raise refusal_error(
                "bad-request",
                f"a window has {LEAST_FRAMES} to {MOST_FRAMES} frames, not {request.frames}",
            )
        self.release(lease.rank)
        path = self.memory_dir / f"{_PREFIX}{lease.rank:05d}-{secrets.token_hex(4)}"
        made = await asyncio.to_thread(ChunkBuffer, path, self._affordable(request.frames))
        if lease.ended:
            made.close()
            raise refusal_error("no-lease", "this lease has ended while its window was made")
        self.release(lease.rank)  # of a request that was sent twice
        self._buffers[lease.rank] = made
        return SharedChunkBuffer(path=str(made.path), frames=made.frames, frame_bytes=CHUNK_BYTES)

    def _affordable(self, frames: int) -> int:
        if self.limit_bytes is None:
            return frames
        windows = sum(buffer.size_bytes for buffer in self._buffers.values())
        taken = self.pool.made_bytes + windows
        fit = min(frames, (self.limit_bytes - taken) // CHUNK_BYTES)
        if fit < LEAST_FRAMES:
            raise NoMemoryError(
                f"a window of {LEAST_FRAMES} frames needs {LEAST_FRAMES * CHUNK_BYTES} bytes, but"
                f" slots and windows take {taken} of {self.limit_bytes}: raise --memory-limit",
                code="no-memory",
            )
        return fit

    def release(self, rank: int) -> None:
        """The rank has restored, or has given up."""
        self._shared_reads.leave(rank)
        if window := self._buffers.pop(rank, None):
            window.close()

    def remove_all_buffers(self) -> None:
        """Remove all windows. For the end of the process."""
        for rank in list(self._buffers):
            self.release(rank)

    # --- chunks ------------------------------------------------------------------------------

    async def fetch_chunks(self, request: ChunksRequest) -> ChunksReady:
        """Bring chunks into frames, each from the nearest place whose copy verifies.

        Raises SidecarError: `bad-request`, `not-verified` (with the last place's reason), `no-slot`
        when the time is up; the window is then gone.
        """
        rank = self.leases.require_lease(request.lease).rank
        if (window := self._buffers.get(rank)) is None:
            raise refusal_error("bad-request", "ask for a window first (POST /v1/window)")
        _check_frames(request.chunks, window)
        if request.announced is not None:
            self._shared_reads.announce(rank, request.id, request.announced)
        try:
            async with asyncio.timeout(request.timeout_s):
                tiers = await self._fill(rank, request, window)
        except (TimeoutError, asyncio.CancelledError) as error:
            if self._buffers.get(rank) is window:  # it is unknown what its frames hold
                self.release(rank)
            if isinstance(error, asyncio.CancelledError):
                raise
            text = f"step {request.id}: not all chunks came in {request.timeout_s:g} s; raise"
            text += f" {RESTORE_TIMEOUT_ENV} in the training process's environment"
            raise refusal_error("no-slot", text) from error
        except (ImageError, StorageError) as error:
            raise refusal_error("not-verified", f"step {request.id}: {error}") from error
        farthest = max(tiers, key=NEAREST_FIRST.index, default=Tier.MEMORY)
        return ChunksReady(tier=farthest)

    async def _fill(self, rank: int, request: ChunksRequest, window: ChunkBuffer) -> list[Tier]:
        saved = sorted({chunk.rank for chunk in request.chunks})
        found = await gather_all([self.fetcher.layout(request.id, rank) for rank in saved])
        layouts = dict(zip(saved, found, strict=True))
        frames = [
            ((chunk.rank, chunk.chunk), _frame(window, chunk, layouts[chunk.rank]))
            for chunk in request.chunks
        ]
        return await self._shared_reads.fill(rank, request.id, frames)

    async def _read(self, chunks: Sequence[SharedChunk]) -> Tier:
        """Read chunks of one saved rank into the first frame of each, and copy them to the rest."""
        step_id, saved = chunks[0].id, chunks[0].key[0]
        frames = [chunk.frames[0][1] for chunk in chunks]
        layout = await self.fetcher.layout(step_id, saved)
        keys = [chunk.key[1] for chunk in chunks]
        tier = await self._bring(step_id, layout, list(zip(keys, frames, strict=True)))
        self.read_bytes[tier] += sum(map(len, frames))
        await gather_all(
            [
                asyncio.to_thread(copy_bytes, filled, frame)
                for filled, chunk in zip(frames, chunks, strict=True)
                for _, frame in chunk.frames
                if frame is not filled
            ]
        )
        self.shared_bytes += sum(
            (len(chunk.frames) - 1) * len(filled)
            for chunk, filled in zip(chunks, frames, strict=True)
        )
        return tier

    async def _bring(
        self, step_id: StepId, layout: Layout, frames: Sequence[tuple[int, memoryview]]
    ) -> Tier:
        def fill(opened: verified_chunks.OpenSource) -> None:
            if opened.manifest.layout.id != layout.id:
                raise StorageError(
                    f"{opened.source.where}: another image of rank {layout.rank} than elsewhere"
                )
            verified_chunks.fill_buffers(opened, frames)

        async def read(source: ShardSource) -> None:
            await self.fetcher.run_with_source(source, fill)

        return (await self.fetcher.ask_nearest_source(step_id, layout.image_index, read))[0].tier


def _check_frames(chunks: Sequence[ChunkReadRequest], window: ChunkBuffer) -> None:
    frames = [chunk.frame for chunk in chunks]
    if len(set(frames)) < len(frames) or any(not 0 <= frame < window.frames for frame in frames):
        raise refusal_error(
            "bad-request", f"each chunk needs a frame of its own, of 0 to {window.frames - 1}"
        )


def _frame(window: ChunkBuffer, chunk: ChunkReadRequest, layout: Layout) -> memoryview:
    if not 0 <= chunk.chunk < layout.chunk_count:
        raise refusal_error(
            "bad-request",
            f"rank {chunk.rank} has chunks 0 to {layout.chunk_count - 1}, not {chunk.chunk}",
        )
    begin, end = chunk_bounds(layout, chunk.chunk)
    return window.get_frame_view(chunk.frame, end - begin)
