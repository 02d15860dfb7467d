"""Puts a shard, then the record of a step, into the archive.

Twice is as good as once: what is there already and is the same is left alone, so every sidecar
may try, and try again. What is there and is another image is never replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from keepstep.errors import ForeignError, ImageError, StorageError
from keepstep.image import PAGE_BYTES, ControlPage, Section
from keepstep.steps import Epoch, StepId, Tier, shard_name
from keepstep_sidecar.archive import record as records
from keepstep_sidecar.archive.pieces import LocalShard, opened, pieces
from keepstep_sidecar.archive.reading import Reader, in_parallel
from keepstep_sidecar.archive.record import Shard, StepRecord
from keepstep_sidecar.archive.store import Store, Stored
from keepstep_sidecar.archive.survey import step_prefix
from keepstep_sidecar.archive.threads import blocking
from keepstep_sidecar.depots import Remote
from keepstep_sidecar.scan import Found

PARTS = 4
"""In flight at once, 8 MiB each."""


@dataclass(frozen=True, kw_only=True)
class Sender:
    """For one run."""

    store: Store
    run: str
    executor: Executor

    async def send(self, found: Found) -> int:
        """Bring a shard there and see that it has arrived. Returns the bytes that were sent: 0
        when it was there.

        Raises Gone when it is not here any more, DigestError when it is damaged here, ForeignError
        when another image has its place, StorageError.
        """
        name = f"{step_prefix(self.run, found.id)}/{shard_name(found.rank, found.world)}"
        with opened(found) as shard:
            if await self._there(name, shard):
                return 0
            given = pieces(shard, parts=PARTS, executor=self.executor)
            try:
                await self.store.upload(name, given, part_bytes=shard.part_bytes, parts=PARTS)
            finally:
                await given.aclose()
            await self._check(name, shard)
            return shard.layout.size_bytes

    async def _there(self, name: str, shard: LocalShard) -> bool:
        """The very same shard is in the archive. A damaged one of ours may be replaced."""
        stored = await self.store.find(name)
        if stored is None or stored.bytes < PAGE_BYTES:
            return False
        page = await self._read(name, stored.bytes - PAGE_BYTES, PAGE_BYTES)
        try:
            control = ControlPage.from_bytes(page)
        except ImageError:
            return False
        theirs = (control.run, control.id, control.rank, control.root)
        ours = shard.control
        if theirs != (ours.run, ours.id, ours.rank, ours.root):
            raise ForeignError(
                f"step {control.id}, rank {control.rank} of run {control.run!r} with root"
                f" {control.root} is there already, unlike {shard.path} (root {ours.root}): two"
                " writers of one run; give one of them another archive or another name",
                path=f"{self.store.where}/{name}",
            )
        return stored.bytes == shard.layout.size_bytes

    async def _check(self, name: str, shard: LocalShard) -> None:
        """As long as it should be, and with our digests at its end."""
        stored = await self.store.find(name)
        size = shard.layout.size_bytes
        if stored is None or stored.bytes != size:
            found = "nothing" if stored is None else f"{stored.bytes} bytes"
            raise StorageError(
                f"{self.store.where}/{name}: sent {size} bytes, found {found}; it is sent again"
            )
        if await self._read(name, shard.layout.digests_begin, len(shard.tail)) != shard.tail:
            raise StorageError(
                f"{self.store.where}/{name}: the archive gives back other bytes than it was sent;"
                " it is sent again"
            )

    async def _read(self, name: str, begin: int, size: int) -> bytes:
        buffer = bytearray(size)
        await self.store.read(name, begin, memoryview(buffer))
        return bytes(buffer)

    # --- the record --------------------------------------------------------------------------

    async def complete(self, id: StepId, *, world: int, epochs: Iterable[Epoch]) -> bool:
        """See to the step's record, once the shards of all ranks are there. False before that.

        Raises ForeignError when somebody archived other shards as this step, ImageError when one
        of the files is not what its name says, StorageError.
        """
        prefix = step_prefix(self.run, id)
        listed = await self.store.list_below(prefix)
        files = {one.name.rpartition("/")[2]: one for one in listed}
        if records.NAME in files:
            await self._compare(id, files)
            return True
        names = [shard_name(rank, world) for rank in range(world)]
        if not all(name in files for name in names):
            return False
        shards = await self._described(id, world, [files[name] for name in names])
        lineage = {epoch.id: epoch for _, epoch in shards} | {one.id: one for one in epochs}
        record = StepRecord(
            run=self.run,
            id=id,
            world=world,
            epochs=tuple(lineage[one] for one in sorted(lineage)),
            shards=tuple(shard for shard, _ in shards),
            written_at=time.time(),
        )
        if not await self.store.write(f"{prefix}/{records.NAME}", record.to_json()):
            await self._agree(record)
        return True

    async def _described(
        self, id: StepId, world: int, files: list[Stored]
    ) -> list[tuple[Shard, Epoch]]:
        """What the shards' own control pages say, all of them of this step and run."""
        reader = Reader(store=self.store, run=self.run, executor=self.executor)
        found: dict[int, tuple[Shard, Epoch]] = {}

        async def describe(one: tuple[int, Stored]) -> None:
            rank, stored = one
            remote = Remote(
                id=id,
                rank=rank,
                world=world,
                bytes=stored.bytes,
                tier=Tier.ARCHIVE,
                where=self.store.where,
                key=stored.name,
            )
            control = await reader.control(remote)
            shard = Shard(
                rank=rank,
                name=shard_name(rank, world),
                bytes=stored.bytes,
                root=control.root or "",
                params_digest=(control.sections or {}).get(Section.PARAMS.value),
            )
            found[rank] = (shard, control.epoch)

        await in_parallel(describe, enumerate(files), limit=16)
        return [found[rank] for rank in range(world)]

    async def _compare(self, id: StepId, files: dict[str, Stored]) -> None:
        record = await self._record(id, files[records.NAME].bytes)
        sizes = {one.name: one.bytes for one in record.shards}
        wrong = [name for name, size in sizes.items() if _size(files.get(name)) != size]
        if wrong:
            raise ForeignError(
                f"names {wrong[0]} with {sizes[wrong[0]]} bytes, which is not there",
                path=f"{self.store.where}/{step_prefix(self.run, id)}/{records.NAME}",
            )

    async def _agree(self, ours: StepRecord) -> None:
        """Somebody was quicker: it must have said the same."""
        name = f"{step_prefix(self.run, ours.id)}/{records.NAME}"
        stored = await self.store.find(name)
        theirs = await self._record(ours.id, stored.bytes if stored else 0)
        if not theirs.same_content(ours):
            raise ForeignError(
                f"another writer archived other shards as step {ours.id} of run {self.run!r};"
                " give one of the two runs another archive or another name",
                path=f"{self.store.where}/{name}",
            )

    async def _record(self, id: StepId, size: int) -> StepRecord:
        name = f"{step_prefix(self.run, id)}/{records.NAME}"
        data = await self._read(name, 0, min(size, records.LIMIT_BYTES))
        path = f"{self.store.where}/{name}"
        return await blocking(None, lambda: StepRecord.from_json(data, path=path))


def _size(stored: Stored | None) -> int | None:
    return None if stored is None else stored.bytes
