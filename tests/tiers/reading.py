"""Reading a shard as a restore does: one source after the other, until one verifies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from keepstep.errors import ImageError, KeepstepError, StorageError
from keepstep.image import ControlPage
from keepstep.image.manifest import Manifest
from keepstep_sidecar.tiers import transfer
from keepstep_sidecar.tiers.source import Cancel, ShardSource
from keepstep_sidecar.tiers.tier import Depot, RemoteShard

T = TypeVar("T")


async def read(depot: Depot, shard: RemoteShard, work: Callable[[ShardSource, Cancel], T]) -> T:
    """What the first source gives that can; raises what the last one did."""
    failure: KeepstepError = StorageError("nobody is left who could be asked")
    for source in depot.sources(shard):
        attempt = functools.partial(work, source)
        try:
            return await transfer.run(None, attempt)
        except (ImageError, StorageError) as error:
            failure = error
            if isinstance(error, ImageError):
                depot.refuse(source)
    raise failure


async def manifest(depot: Depot, shard: RemoteShard) -> Manifest:
    def work(source: ShardSource, cancel: Cancel) -> Manifest:
        with transfer.opened(source, cancel) as opened:
            return opened.manifest

    return await read(depot, shard, work)


async def load(depot: Depot, shard: RemoteShard, view: memoryview) -> ControlPage:
    return await read(depot, shard, lambda at, cancel: transfer.load(at, view, cancel=cancel))


async def chunks(depot: Depot, shard: RemoteShard, wanted: transfer.Wanted) -> None:
    def work(source: ShardSource, cancel: Cancel) -> None:
        with transfer.opened(source, cancel) as opened:
            transfer.fill(opened, wanted)

    await read(depot, shard, work)
