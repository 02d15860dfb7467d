"""Reads shards from an archive. Nothing that it gives back is unverified."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from keepstep.errors import DigestError, ForeignError, FormatError, ImageError, UsageError
from keepstep.image import (
    PAGE_BYTES,
    ControlPage,
    Layout,
    check_chunk,
    check_control,
    check_table,
    chunk_bounds,
)
from keepstep.image.headers import read_length
from keepstep_sidecar.concurrency import blocking
from keepstep_sidecar.tiers.archive.store import Store
from keepstep_sidecar.tiers.tier import RemoteShard

T = TypeVar("T")

_FIRST_READ_BYTES = 64 << 10
"""Most headers are shorter; the others take a second read."""

IN_FLIGHT = 6
"""Ranges of one shard that are asked for at once: a link of 10 Gbit/s with 40 ms is kept full."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """`run`: only its shards are accepted. Errors name the object's full address."""

    store: Store
    run: str
    executor: Executor

    def address(self, shard: RemoteShard) -> str:
        """Where the shard is, for people."""
        return f"{self.store.where}/{shard.key}"

    async def layout(self, shard: RemoteShard) -> Layout:
        """Raises StorageError, ImageError."""
        try:
            first = await self._bytes(shard, 0, min(shard.size_bytes, _FIRST_READ_BYTES))
            length = read_length(first)
            if length > shard.size_bytes:
                raise FormatError(f"{shard.size_bytes} bytes of a header of {length}")
            header = first[:length]
            if length > len(first):
                header += await self._bytes(shard, len(first), length - len(first))
            return Layout.parse(header, size_bytes=shard.size_bytes)
        except ImageError as error:
            raise type(error)(error.reason, path=self.address(shard)) from None

    async def control(self, shard: RemoteShard) -> ControlPage:
        """Raises StorageError, ImageError: also when it is not what `shard` says."""
        try:
            begin = max(0, shard.size_bytes - PAGE_BYTES)
            control = ControlPage.from_bytes(await self._bytes(shard, begin, PAGE_BYTES))
            self._check(shard, control)
        except ImageError as error:
            raise type(error)(error.reason, path=self.address(shard)) from None
        return control

    def _check(self, shard: RemoteShard, control: ControlPage) -> None:
        found = (control.run, control.id, control.rank, control.world)
        if found != (self.run, shard.step_id, shard.rank, shard.world):
            raise ForeignError(
                f"step {control.id}, rank {control.rank} of {control.world} of run {control.run!r},"
                f" not step {shard.step_id}, rank {shard.rank} of {shard.world} of run {self.run!r}"
            )
        if control.root is None:
            raise DigestError("sealed in memory only: it has no digests")
        if shard.root is not None and control.root != shard.root:
            raise DigestError("not the shard that was archived: its digests differ")

    async def _bytes(self, shard: RemoteShard, begin: int, size: int) -> bytes:
        buffer = bytearray(size)
        await self.store.read(shard.key, begin, memoryview(buffer))
        return bytes(buffer)

    async def table(self, shard: RemoteShard, layout: Layout, control: ControlPage) -> bytes:
        """The digest table, checked. Raises StorageError, ImageError."""
        size = layout.control_begin - layout.digests_begin
        table = await self._bytes(shard, layout.digests_begin, size)
        check_table(control, layout, table, path=self.address(shard))
        return table

    async def described(self, shard: RemoteShard) -> tuple[Layout, ControlPage, bytes]:
        """Header, control page and table, checked against each other."""
        layout, control = await asyncio.gather(self.layout(shard), self.control(shard))
        check_control(control, layout, path=self.address(shard))
        return layout, control, await self.table(shard, layout, control)

    async def load(
        self,
        shard: RemoteShard,
        view: memoryview,
        *,
        on_chunk: Callable[[int], None] = lambda _: None,
    ) -> ControlPage:
        """See `Depot.load`. `on_chunk(bytes)` after each verified chunk."""
        view[-PAGE_BYTES:] = bytes(PAGE_BYTES)
        layout, control, table = await self.described(shard)
        if len(view) != layout.size_bytes:
            raise UsageError(
                f"{self.address(shard)}: a slot of {layout.size_bytes} bytes, not {len(view)}"
            )

        async def fetch(chunk: int) -> None:
            begin, end = chunk_bounds(layout, chunk)
            await self.fetch(shard, layout, table, chunk, view[begin:end])
            on_chunk(end - begin)

        await in_parallel(fetch, range(layout.chunk_count))
        view[layout.digests_begin : layout.control_begin] = table
        view[layout.control_begin :] = control.to_bytes()
        return control

    async def chunks(self, shard: RemoteShard, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """See `Depot.chunks`."""
        layout, _, table = await self.described(shard)

        async def fetch(one: tuple[int, memoryview]) -> None:
            await self.fetch(shard, layout, table, *one)

        await in_parallel(fetch, wanted)

    async def verify(self, shard: RemoteShard, *, on_chunk: Callable[[int], None]) -> None:
        """Read and check every byte, with memory for a few chunks. Raises as `load`."""
        layout, _, table = await self.described(shard)

        async def fetch(chunk: int) -> None:
            begin, end = chunk_bounds(layout, chunk)
            view = memoryview(mmap.mmap(-1, end - begin))
            await self.fetch(shard, layout, table, chunk, view)
            on_chunk(end - begin)

        await in_parallel(fetch, range(layout.chunk_count))

    async def fetch(
        self, shard: RemoteShard, layout: Layout, table: bytes, chunk: int, view: memoryview
    ) -> None:
        """One chunk, verified against a table that was. Raises StorageError, DigestError."""
        begin, end = chunk_bounds(layout, chunk)
        if len(view) != end - begin:
            raise UsageError(f"chunk {chunk} has {end - begin} bytes, not {len(view)}")
        await self.store.read(shard.key, begin, view)
        path = self.address(shard)
        await blocking(self.executor, lambda: check_chunk(layout, chunk, view, table, path=path))


async def in_parallel(
    work: Callable[[T], Awaitable[None]], items: Iterable[T], *, limit: int = IN_FLIGHT
) -> None:
    """`work` for each item, at most `limit` at once. The first error ends it and is raised; by
    then nothing is in flight any more."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    tasks = [asyncio.ensure_future(worker()) for _ in range(limit)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
