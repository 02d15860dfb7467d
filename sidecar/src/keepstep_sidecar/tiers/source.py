"""One saved shard in one place beyond memory: a local volume, a peer, an archive.

All places look the same to whoever restores from them. What fails leaves the caller with the next
place; a local shard that fails is quarantined on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from keepstep.image import ControlPage, Layout
from keepstep.steps import StepId, Tier
from keepstep_sidecar.concurrency import all_threads
from keepstep_sidecar.tiers.tier import Depot, RemoteShard
from keepstep_sidecar.volume.scan import LocalShard
from keepstep_sidecar.volume.shard_file import Proof
from keepstep_sidecar.volume.volume_set import VolumeSet

T = TypeVar("T")

Wanted = Sequence[tuple[int, memoryview]]
"""(chunk number, page-aligned buffer of exactly its bytes)."""

_PROOFS_KEPT = 1024
"""Sixteen bytes a chunk: a table is small, however large its shard."""


class Origin(Protocol):
    """A place that holds a shard. All methods raise StorageError and ImageError."""

    @property
    def tier(self) -> Tier: ...
    @property
    def where(self) -> str:
        """For people."""

    @property
    def id(self) -> StepId: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def twins(self) -> tuple[int, ...]: ...

    async def layout(self) -> Layout: ...
    async def control(self) -> ControlPage: ...
    async def load(self, view: memoryview) -> ControlPage:
        """The whole image, verified, the seal last."""

    async def chunks(self, wanted: Wanted) -> None:
        """Fill each buffer with its chunk, verified. No buffer is touched after the return."""


class LocalReader:
    """Reads of this machine's volumes, on threads of their own."""

    def __init__(self, volumes: VolumeSet, *, loads: Executor, chunks: Executor) -> None:
        """`loads`: a whole image at a time. `chunks`: as many as the drives shall be busy with."""
        self._volumes = volumes
        self._loads = loads
        self._chunks = chunks
        self._proofs: dict[tuple[StepId, int, str | None], Proof] = {}

    async def load(self, found: LocalShard, view: memoryview) -> ControlPage:
        return await _on(self._loads, lambda: self._volumes.load(found.path, view))

    async def proof(self, found: LocalShard) -> Proof:
        """Read once and remembered."""
        key = (found.step_id, found.rank, found.root)
        if (proof := self._proofs.get(key)) is None:
            proof = await _on(self._chunks, lambda: self._volumes.prove(found.path))
            if len(self._proofs) >= _PROOFS_KEPT:
                self._proofs.clear()
            self._proofs[key] = proof
        return proof

    async def chunks(self, found: LocalShard, wanted: Wanted) -> None:
        proof = await self.proof(found)

        def read(index: int, into: memoryview) -> None:
            self._volumes.load_chunk(found.path, index, into, proof)

        await all_threads([_reading(self._chunks, read, index, into) for index, into in wanted])


def _reading(
    executor: Executor, read: Callable[[int, memoryview], None], index: int, into: memoryview
) -> asyncio.Future[None]:
    return asyncio.get_running_loop().run_in_executor(executor, read, index, into)


async def _on(executor: Executor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work)


@dataclass(frozen=True, kw_only=True)
class LocalOrigin:
    """On a volume of this machine."""

    found: LocalShard
    reader: LocalReader
    tier: Tier = Tier.LOCAL

    @property
    def where(self) -> str:
        return str(self.found.path)

    @property
    def id(self) -> StepId:
        return self.found.step_id

    @property
    def rank(self) -> int:
        return self.found.rank

    @property
    def world(self) -> int:
        return self.found.world

    @property
    def bytes(self) -> int:
        return self.found.size_bytes

    @property
    def twins(self) -> tuple[int, ...]:
        return self.found.twins

    async def layout(self) -> Layout:
        return self.found.layout

    async def control(self) -> ControlPage:
        return (await self.reader.proof(self.found)).control

    async def load(self, view: memoryview) -> ControlPage:
        return await self.reader.load(self.found, view)

    async def chunks(self, wanted: Wanted) -> None:
        await self.reader.chunks(self.found, wanted)


@dataclass(frozen=True, kw_only=True)
class RemoteOrigin:
    """In a depot."""

    remote: RemoteShard
    depot: Depot

    @property
    def tier(self) -> Tier:
        return self.remote.tier

    @property
    def where(self) -> str:
        return self.remote.where

    @property
    def id(self) -> StepId:
        return self.remote.step_id

    @property
    def rank(self) -> int:
        return self.remote.rank

    @property
    def world(self) -> int:
        return self.remote.world

    @property
    def bytes(self) -> int:
        return self.remote.size_bytes

    @property
    def twins(self) -> tuple[int, ...]:
        return self.remote.twins

    async def layout(self) -> Layout:
        return await self.depot.layout(self.remote)

    async def control(self) -> ControlPage:
        return await self.depot.control(self.remote)

    async def load(self, view: memoryview) -> ControlPage:
        return await self.depot.load(self.remote, view)

    async def chunks(self, wanted: Wanted) -> None:
        await self.depot.chunks(self.remote, wanted)
