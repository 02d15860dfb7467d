"""Chunks of saved shards, each verified, into shared memory that a trainer maps.

A window belongs to one rank's restore. A copy that fails is quarantined or refused, and the same
chunk comes from the next place that holds the very same image.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from keepstep.digests import CHUNK_BYTES
from keepstep.errors import ImageError, NoMemoryError, StorageError
from keepstep.image import Layout, chunk_bounds
from keepstep.ledger import NEAREST_FIRST
from keepstep.protocol import (
    RESTORE_TIMEOUT_ENV,
    Chunk,
    Chunks,
    ChunksRequest,
    Window,
    WindowRequest,
)
from keepstep.steps import StepId, Tier
from keepstep_sidecar.gathering import all_of
from keepstep_sidecar.leases import Leases
from keepstep_sidecar.nearest import Nearest
from keepstep_sidecar.origins import Origin
from keepstep_sidecar.problems import refuse
from keepstep_sidecar.slotkeeper import Slotkeeper
from keepstep_sidecar.window import LEAST_FRAMES, MOST_FRAMES, WindowFile, sweep, window_path


class Windows:
    """`/v1/window` and `/v1/chunks`."""

    def __init__(
        self,
        keeper: Slotkeeper,
        leases: Leases,
        nearest: Nearest,
        *,
        memory_dir: Path,
        limit_bytes: int | None,
    ) -> None:
        """`limit_bytes`: of slots and windows together."""
        self._keeper = keeper
        self._leases = leases
        self._nearest = nearest
        self._memory_dir = memory_dir
        self._limit_bytes = limit_bytes
        self._windows: dict[int, WindowFile] = {}

    def start(self) -> None:
        """Remove windows that an earlier sidecar left."""
        sweep(self._memory_dir)

    # --- windows -----------------------------------------------------------------------------

    async def window(self, request: WindowRequest) -> Window:
        """A new window for this lease; the one that it had is gone. Fewer frames when memory is
        short. Raises NoMemoryError, SidecarError `bad-request`."""
        lease = self._leases.require(request.lease)
        if not LEAST_FRAMES <= request.frames <= MOST_FRAMES:
            raise refuse(
                "bad-request",
                f"a window has {LEAST_FRAMES} to {MOST_FRAMES} frames, not {request.frames}",
            )
        self.let_go(lease.rank)
        path = window_path(self._memory_dir, lease.rank, secrets.token_hex(4))
        made = await asyncio.to_thread(WindowFile, path, self._affordable(request.frames))
        if lease.ended:
            made.close()
            raise refuse("no-lease", "this lease has ended while its window was made")
        self.let_go(lease.rank)  # of a request that was sent twice
        self._windows[lease.rank] = made
        return Window(path=str(made.path), frames=made.frames, frame_bytes=CHUNK_BYTES)

    def _affordable(self, frames: int) -> int:
        if self._limit_bytes is None:
            return frames
        windows = sum(one.size_bytes for one in self._windows.values())
        taken = self._keeper.made_bytes + windows
        fit = min(frames, (self._limit_bytes - taken) // CHUNK_BYTES)
        if fit < LEAST_FRAMES:
            raise NoMemoryError(
                f"a window of {LEAST_FRAMES} frames needs {LEAST_FRAMES * CHUNK_BYTES} bytes, but"
                f" slots and windows take {taken} of {self._limit_bytes}: raise --memory-limit",
                code="no-memory",
            )
        return fit

    def let_go(self, rank: int) -> None:
        """The rank has restored, or will not."""
        if window := self._windows.pop(rank, None):
            window.close()

    def stop(self) -> None:
        """For the end of the process."""
        for rank in list(self._windows):
            self.let_go(rank)

    # --- chunks ------------------------------------------------------------------------------

    async def chunks(self, request: ChunksRequest) -> Chunks:
        """Bring chunks into frames, from the nearest places that have them whole.

        Raises SidecarError: `bad-request`, `not-verified` (with the last place's reason), `no-slot`
        when the time is up: the window is gone then.
        """
        started = time.monotonic()
        rank = self._leases.require(request.lease).rank
        if (window := self._windows.get(rank)) is None:
            raise refuse("bad-request", "ask for a window first (POST /v1/window)")
        _check_frames(request.chunks, window)
        wanted: dict[int, list[Chunk]] = {}
        for chunk in request.chunks:
            wanted.setdefault(chunk.rank, []).append(chunk)
        try:
            async with asyncio.timeout(request.timeout_s):
                tiers = await all_of(
                    [self._bring(request.id, saved, each, window) for saved, each in wanted.items()]
                )
        except (TimeoutError, asyncio.CancelledError) as error:
            if self._windows.get(rank) is window:  # nobody knows what its frames hold
                self.let_go(rank)
            if isinstance(error, asyncio.CancelledError):
                raise
            text = f"step {request.id}: not all chunks came in {request.timeout_s:g} s; raise"
            text += f" {RESTORE_TIMEOUT_ENV} in the training process's environment"
            raise refuse("no-slot", text) from error
        except (ImageError, StorageError) as error:
            raise refuse("not-verified", f"step {request.id}: {error}") from error
        farthest = max(tiers, key=NEAREST_FIRST.index, default=Tier.MEMORY)
        return Chunks(seconds=time.monotonic() - started, tier=farthest)

    async def _bring(
        self, id: StepId, saved: int, chunks: Sequence[Chunk], window: WindowFile
    ) -> Tier:
        layout = await self._nearest.layout(id, saved)
        wanted = [(one.chunk, _frame(window, one, layout)) for one in chunks]

        async def read(origin: Origin) -> None:
            if (await origin.layout()).id != layout.id:
                raise StorageError(f"{origin.where}: another image of rank {saved} than elsewhere")
            await origin.chunks(wanted)

        return (await self._nearest.ask(id, saved, read))[0].tier


def _check_frames(chunks: Sequence[Chunk], window: WindowFile) -> None:
    frames = [one.frame for one in chunks]
    if len(set(frames)) < len(frames) or any(not 0 <= one < window.frames for one in frames):
        raise refuse(
            "bad-request", f"each chunk needs a frame of its own, of 0 to {window.frames - 1}"
        )


def _frame(window: WindowFile, one: Chunk, layout: Layout) -> memoryview:
    if not 0 <= one.chunk < layout.chunk_count:
        raise refuse(
            "bad-request",
            f"rank {one.rank} has chunks 0 to {layout.chunk_count - 1}, not {one.chunk}",
        )
    begin, end = chunk_bounds(layout, one.chunk)
    return window.frame(one.frame, end - begin)
