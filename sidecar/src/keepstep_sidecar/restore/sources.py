"""Where the images of all saved ranks are, for a trainer that cannot restore from its own image.

A trainer with another world size or another layout reads a little of many images. It maps the
images in this machine's memory itself; all others arrive chunk by chunk (see `chunk_buffers`). An
image that was named to a rank stays where it is until the rank has restored or its lease has ended.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from keepstep.core.node import StepReadEvent
from keepstep.errors import ImageError, StorageError
from keepstep.image import Layout
from keepstep.image.control_page import Manifest
from keepstep.steps import NEAREST_FIRST, StepId, Tier
from keepstep.wire.trainer import Headers, HeadersRequest, ImageSource, Sources, SourcesRequest
from keepstep_sidecar.commit.node_host import NodeHost
from keepstep_sidecar.concurrency import gather_limited
from keepstep_sidecar.error_responses import refusal_error
from keepstep_sidecar.leases import Leases
from keepstep_sidecar.memory.slot_pool import PooledSlot, SlotPool
from keepstep_sidecar.restore.fetcher import Fetcher
from keepstep_sidecar.tiers.source import ShardSource

_AT_ONCE = 32
"""How many shards are asked for their first or last pages at the same time."""


@dataclass
class _Reading:
    """What one rank reads now: the step, and the slots that are pinned for it."""

    id: StepId
    pins: list[PooledSlot] = field(default_factory=list)


@dataclass(eq=False)
class ImageSourceHandlers:
    """`/v1/sources` and `/v1/headers`."""

    pool: SlotPool
    node_host: NodeHost
    leases: Leases
    fetcher: Fetcher
    _readings: dict[int, _Reading] = field(default_factory=dict)
    _beyond_memory: dict[tuple[StepId, int], tuple[ImageSource, ...]] = field(default_factory=dict)
    _headers: dict[tuple[StepId, int], str] = field(default_factory=dict)
    """Headers, kept while a rank reads: all ranks of the node ask for the same ones."""
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._copies, self._local_shards = self.node_host.copies, self.node_host.local_shards

    # --- sources -----------------------------------------------------------------------------

    async def list_rank_sources(self, request: SourcesRequest) -> Sources:
        """One source for each saved rank that has one, memory first. Of twins beyond this machine's
        memory only one is named: that saves a page and a header to read for each other node. This
        rank's own image is always among the sources.

        Raises SidecarError `unknown-step` when there is no source at all, `starting` before the
        scan.
        """
        rank, step_id = self.leases.require_lease(request.lease).rank, request.id
        if not self._local_shards.scanned:
            raise refusal_error(
                "starting", "the volumes are still being scanned; ask for candidates first"
            )
        self.release(rank)  # from now on the rank reads this step, and no other
        self.node_host.feed(StepReadEvent(step_id, begins=True))
        reading = self._readings[rank] = _Reading(step_id)
        found = self._mapped(reading, step_id, bad=request.bad)
        async with self._asking:
            left = await self._find_beyond(found, step_id, own=rank, every=request.every)
        world = self._copies.world_of(step_id)
        if not found or world is None:
            raise refusal_error(
                "unknown-step", f"no image of step {step_id} is within reach of rank {rank}"
            )
        return Sources(
            id=step_id,
            world=world,
            sources=tuple(found[rank] for rank in sorted(found)),
            left_out=left,
        )

    def _mapped(
        self, reading: _Reading, step_id: StepId, *, bad: Collection[str]
    ) -> dict[int, ImageSource]:
        """Images in slots. They are pinned before anything else can run."""
        found = {}
        for saved in list(self.pool.ranks):
            slot = self.pool.find_verified(saved, step_id, bad=bad)
            if slot is None or (control := slot.file.control()) is None:
                continue  # no image, or a straggler has begun to fill the slot
            slot.pin()
            reading.pins.append(slot)
            found[saved] = ImageSource(
                rank=saved,
                tier=slot.source_tier,
                bytes=slot.layout.size_bytes,
                extras_bytes=control.extras_bytes,
                path=str(slot.file.path),
                twins=slot.layout.twins,
            )
            if (base := self.pool.find_base_slot(slot)) is not None:
                number = base.layout.image_index
                found[number] = ImageSource(
                    rank=number,
                    tier=base.source_tier,
                    bytes=base.layout.size_bytes,
                    extras_bytes=0,
                    path=str(base.file.path),
                )
        return found

    async def _find_beyond(
        self, found: dict[int, ImageSource], step_id: StepId, *, own: int, every: bool
    ) -> tuple[int, ...]:
        """Add the sources that are needed besides `found`. If a copy turns out to be unusable, its
        twins are tried. Returns the ranks that were left out."""
        copies = self._copies
        world = copies.world_of(step_id) or 1
        # Each node begins its search at its first rank. So different nodes do not all read the same
        # copies, but all ranks of one node do.
        here = min(self.leases.ranks)
        left = [rank for rank in copies.ranks_at_rest(step_id) if rank not in found]
        left.sort(
            key=lambda rank: (_far(copies.nearest_tier(step_id, rank)), (rank - here) % world)
        )
        while left:
            asked = left if every else copies.one_of_twins(step_id, left, known=found)
            if own % world in left and own % world not in asked:
                asked.append(own % world)
            if not asked:
                break
            found_sources = await gather_limited(
                [partial(self._remote_sources, step_id, rank) for rank in asked], most=_AT_ONCE
            )
            tried = set(asked)
            found.update((source.rank, source) for some in found_sources for source in some)
            left = [rank for rank in left if rank not in tried]
        return tuple(sorted(left))

    async def _remote_sources(self, step_id: StepId, saved: int) -> tuple[ImageSource, ...]:
        """The source at the nearest place that can show the shard's control page, and that of its
        base if it has one; else none."""
        if (known := self._beyond_memory.get((step_id, saved))) is not None:
            return known
        with suppress(ImageError, StorageError):
            source, manifest = await self.fetcher.ask_nearest_source(
                step_id, saved, self.fetcher.manifest
            )
            sources: tuple[ImageSource, ...] = (await self._seen(step_id, saved, source, manifest),)
            if manifest.control.base is not None:
                number = saved + manifest.layout.world
                at, base = await self.fetcher.ask_nearest_source(
                    step_id, number, self.fetcher.manifest
                )
                sources = (*sources, await self._seen(step_id, number, at, base))
            self._beyond_memory[step_id, saved] = sources
            return sources
        return ()

    async def _seen(
        self, step_id: StepId, number: int, source: ShardSource, manifest: Manifest
    ) -> ImageSource:
        self._headers[step_id, number] = await _packed(manifest.layout)
        return ImageSource(
            rank=number,
            tier=source.tier,
            bytes=source.shard.size_bytes,
            extras_bytes=manifest.control.extras_bytes,
            twins=tuple(rank for rank in source.shard.alike if rank != number),
        )

    # --- headers -----------------------------------------------------------------------------

    async def headers(self, request: HeadersRequest) -> Headers:
        """Headers in the order of the request. Raises SidecarError `not-verified`."""
        self.leases.require_lease(request.lease)
        asked = [partial(self._header, request.id, saved) for saved in request.ranks]
        try:
            texts = await gather_limited(asked, most=_AT_ONCE)
        except (ImageError, StorageError) as error:
            raise refusal_error("not-verified", f"step {request.id}: {error}") from error
        return Headers(headers=tuple(texts))

    async def _header(self, step_id: StepId, saved: int) -> str:
        if (text := self._headers.get((step_id, saved))) is None:
            text = await _packed(await self.fetcher.layout(step_id, saved))
            self._headers[step_id, saved] = text
        return text

    def release(self, rank: int) -> None:
        """The rank has restored, or has given up."""
        if (reading := self._readings.pop(rank, None)) is None:
            return
        for slot in reading.pins:
            slot.unpin()
        self.node_host.feed(StepReadEvent(reading.id, begins=False))
        if not self._readings:
            self._beyond_memory.clear()
            self._headers.clear()


def _far(tier: Tier | None) -> int:
    return len(NEAREST_FIRST) if tier is None else NEAREST_FIRST.index(tier)


async def _packed(layout: Layout) -> str:
    packed = await asyncio.to_thread(zlib.compress, layout.header, 1)
    return base64.b64encode(packed).decode()
