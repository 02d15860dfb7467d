"""Reading a shard as a restore does: one source after the other, until one verifies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from keepstep.errors import ImageError, KeepstepError, StorageError
from keepstep.image import ControlPage
from keepstep.image.control_page import Manifest
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.tiers.remote_tier import RemoteShard, RemoteTier
from keepstep_sidecar.tiers.source import ReadCancellation, ShardSource

T = TypeVar("T")


async def read(
    remote_tier: RemoteTier, shard: RemoteShard, work: Callable[[ShardSource, ReadCancellation], T]
) -> T:
    """What the first source gives that can; raises what the last one did."""
    failure: KeepstepError = StorageError("nobody is left who could be asked")
    for source in remote_tier.sources(shard):
        attempt = functools.partial(work, source)
        try:
            return await verified_chunks.run_cancellable(None, attempt)
        except (ImageError, StorageError) as error:
            failure = error
            if isinstance(error, ImageError) and isinstance(remote_tier, PeerTier):
                remote_tier.exclude_source(source, shard.step_id)
    raise failure


async def manifest(remote_tier: RemoteTier, shard: RemoteShard) -> Manifest:
    def work(source: ShardSource, cancel: ReadCancellation) -> Manifest:
        with verified_chunks.open_verified(source, cancel) as opened:
            return opened.manifest

    return await read(remote_tier, shard, work)


async def load(remote_tier: RemoteTier, shard: RemoteShard, view: memoryview) -> ControlPage:
    return await read(
        remote_tier, shard, lambda at, cancel: verified_chunks.load_image(at, view, cancel=cancel)
    )


async def chunks(
    remote_tier: RemoteTier, shard: RemoteShard, buffers: verified_chunks.ChunkViews
) -> None:
    def work(source: ShardSource, cancel: ReadCancellation) -> None:
        with verified_chunks.open_verified(source, cancel) as opened:
            verified_chunks.fill_buffers(opened, buffers)

    await read(remote_tier, shard, work)
