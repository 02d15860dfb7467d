"""An archive for whoever has no run of their own: list, verify and pull for `keepstep archive`."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import DigestError, ImageError, RestoreError, StorageError, UsageError
from keepstep.image import check_chunk, chunk_bounds
from keepstep_sidecar.config.archive import ArchiveConfig
from keepstep_sidecar.tiers.archive.index import ArchivedStep, Survey, Surveyor, remotes
from keepstep_sidecar.tiers.archive.read import Reader, in_parallel
from keepstep_sidecar.tiers.archive.store import Store, open_store
from keepstep_sidecar.tiers.tier import RemoteShard
from keepstep_sidecar.volume.filesystem import Filesystem

_THREADS = 3


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One run in an archive."""

    run: str
    store: Store
    reader: Reader

    async def survey(self) -> Survey:
        """Raises StorageError."""
        return await Surveyor(self.store, self.run).survey()

    def shards(self, step: ArchivedStep) -> tuple[RemoteShard, ...]:
        """Of a complete step."""
        return remotes(step, run=self.run, where=self.store.where)

    async def chosen(self, word: str | None, *, sound: bool) -> tuple[ArchivedStep, ...]:
        """Steps by number or by full name; without a word all that have a record.

        `sound`: exactly one, and complete. Raises UsageError, RestoreError.
        """
        survey = await self.survey()
        if survey.conflict and sound:
            raise RestoreError(survey.conflict)
        found = tuple(one for one in survey.steps if _means(one, word) and not one.partial)
        place = f"{self.store.where}/{self.run}"
        if not found:
            what = f"step {word}" if word is not None else "any step"
            raise UsageError(f"{place} does not hold {what}; `keepstep archive ls` lists them")
        if sound and len(found) > 1:
            names = ", ".join(str(one.id) for one in found)
            raise UsageError(f"{word} is ambiguous in {place}: choose one of {names}")
        if sound and found[0].fault:
            raise RestoreError(f"step {word} cannot be restored: {found[0].fault}")
        return found

    async def verify(self, step: ArchivedStep, *, on_chunk: Callable[[int], None]) -> list[str]:
        """What is wrong with the shards of a complete step. Raises StorageError."""
        results = [await self._fault(shard, on_chunk) for shard in self.shards(step)]
        return [fault for fault in results if fault]

    async def _fault(self, shard: RemoteShard, on_chunk: Callable[[int], None]) -> str:
        try:
            await self.reader.verify(shard, on_chunk=on_chunk)
        except ImageError as error:
            return str(error)
        return ""


def _means(step: ArchivedStep, word: str | None) -> bool:
    return word is None or word in (str(step.id), str(step.id.step))


@asynccontextmanager
async def opened(config: ArchiveConfig, run: str | None) -> AsyncIterator[Holding]:
    """The run in the archive, the only one if it is not named. Raises UsageError, StorageError."""
    store = open_store(config)
    executor = ThreadPoolExecutor(_THREADS)
    try:
        name = run or await _only_run(store)
        reader = Reader(store=store, run=name, executor=executor)
        yield Holding(run=name, store=store, reader=reader)
    finally:
        await store.close()
        executor.shutdown(wait=False, cancel_futures=True)


async def _only_run(store: Store) -> str:
    names = await store.directories("")
    if not names:
        raise UsageError(f"{store.where} holds no run")
    if len(names) > 1:
        raise UsageError(
            f"{store.where} holds {len(names)} runs; choose one with --run: {', '.join(names[:10])}"
        )
    return names[0]


# --- pull ------------------------------------------------------------------------------------
#
# Fetches an archived step into a local directory, so that it can be interrupted and go on.
#
# A shard grows under a hidden name; what is in it already is proved by the digests, chunk by
# chunk, so nothing is believed because a file has the right length. A step's directory gets its
# name when all its shards are whole: readers never see a part.


async def pull_step(
    holding: Holding, step: ArchivedStep, target: Path, *, on_chunk: Callable[[int], None]
) -> Path:
    """The step below `target`, as `<target>/<step>`. Raises StorageError, ImageError,
    RestoreError when something else has that name."""
    final = target / str(step.id)
    if final.exists():
        raise RestoreError(f"{final} exists already; move it away, or verify it as it is")
    growing = target / f".{step.id}.pulling"
    try:
        growing.mkdir(parents=True, exist_ok=True)
        for shard in holding.shards(step):
            await _pull(holding, shard, growing, on_chunk)
        await asyncio.to_thread(_finish, growing, final)
    except OSError as error:
        raise StorageError(f"cannot write {growing}: {error}") from error
    return final


async def _pull(
    holding: Holding, shard: RemoteShard, directory: Path, on_chunk: Callable[[int], None]
) -> None:
    path = directory / shard.key.rpartition("/")[2]
    layout, control, table = await holding.reader.described(shard)
    with path.open("a+b") as file:
        # Every block now: a disk that is full under a mapping ends the process.
        Filesystem().allocate(file.fileno(), layout.size_bytes)
        file.truncate(layout.size_bytes)
        mapping = mmap.mmap(file.fileno(), layout.size_bytes)
        view = memoryview(mapping)

        def missing(chunk: int) -> bool:
            begin, end = chunk_bounds(layout, chunk)
            try:
                check_chunk(layout, chunk, view[begin:end], table)
            except DigestError:
                return True
            on_chunk(end - begin)
            return False

        async def fetch(chunk: int) -> None:
            begin, end = chunk_bounds(layout, chunk)
            await holding.reader.fetch(shard, layout, table, chunk, view[begin:end])
            on_chunk(end - begin)

        chunks = range(layout.chunk_count)
        wanted = await asyncio.to_thread(lambda: list(filter(missing, chunks)))
        await in_parallel(fetch, wanted)
        view[layout.digests_begin : layout.control_begin] = table
        view[layout.control_begin :] = control.to_bytes()
        await asyncio.to_thread(mapping.flush)
        await asyncio.to_thread(os.fsync, file.fileno())


def _finish(growing: Path, final: Path) -> None:
    filesystem = Filesystem()
    filesystem.sync_directory(growing)
    os.rename(growing, final)
    filesystem.sync_directory(final.parent)
