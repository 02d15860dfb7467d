"""Asks the places of a saved shard, nearest first, until one gives a usable answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from typing import TypeVar

from keepstep.errors import ImageError, KeepstepError, StorageError
from keepstep.image import ControlPage, Layout
from keepstep.image.manifest import Manifest
from keepstep.steps import StepId
from keepstep_sidecar.commit.committer import Committer
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.tiers import transfer
from keepstep_sidecar.tiers.source import Cancel, ShardSource

T = TypeVar("T")


class Fetcher:
    """Reads copies beyond memory. Of images in memory, which are mapped, only headers are read."""

    def __init__(self, pool: SlotPool, committer: Committer, threads: Executor) -> None:
        self._copies, self._remotes = committer.copies, committer.remotes
        self._threads = threads
        self._manifests = transfer.Manifests()
        self._pool = pool
        self._committer = committer

    async def ask(
        self, id: StepId, saved: int, question: Callable[[ShardSource], Awaitable[T]]
    ) -> tuple[ShardSource, T]:
        """The first place that can answer, and its answer. A copy that fails is not asked again.

        Raises the last place's error, or StorageError when there is no place.
        """
        failure: KeepstepError = StorageError(f"step {id}: no copy of rank {saved} is in reach")
        tried: list[ShardSource] = []
        while (source := await self._next(id, saved, tried)) is not None:
            tried.append(source)
            try:
                return source, await question(source)
            except (ImageError, StorageError) as error:
                failure = error
                await self._committer.reject(source, error)
        raise failure

    async def _next(
        self, id: StepId, saved: int, tried: Collection[ShardSource]
    ) -> ShardSource | None:
        """The next place to ask. Remote tiers are listed only if nothing that is known is left."""
        left = [one for one in self._copies.origins(id, saved) if one not in tried]
        if not left and not self._remotes.looked:
            await self._committer.look_beyond()
            left = [one for one in self._copies.origins(id, saved) if one not in tried]
        return left[0] if left else None

    async def read(self, source: ShardSource, work: Callable[[transfer.Opened], T]) -> T:
        """Run `work` on a thread, with the source open. Raises StorageError, ImageError."""

        def opened(cancel: Cancel) -> T:
            with transfer.opened(source, cancel, self._manifests) as found:
                return work(found)

        return await transfer.run(self._threads, opened)

    async def load(self, source: ShardSource, view: memoryview) -> ControlPage:
        """Load the whole image into a slot, verified, seal last. Raises StorageError,
        ImageError."""
        return await transfer.run(
            self._threads,
            lambda cancel: transfer.load(source, view, cancel=cancel, manifests=self._manifests),
        )

    async def manifest(self, source: ShardSource) -> Manifest:
        """The manifest, against which each chunk is verified."""
        if (known := self._manifests.known(source)) is not None:
            return known
        return await self.read(source, lambda opened: opened.manifest)

    async def layout(self, id: StepId, saved: int) -> Layout:
        """The layout of the saved rank's image. Raises as `ask` does."""
        slots = self._pool.ranks.get(saved)
        if slots is not None and (at := slots.find(id)) is not None:
            return at.layout
        return (await self.ask(id, saved, self.manifest))[1].layout
