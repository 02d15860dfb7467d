"""An archive for whoever looks at it without a run of their own: the `keepstep archive` command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from keepstep.errors import ImageError, RestoreError, UsageError
from keepstep_sidecar.archive.reading import Reader
from keepstep_sidecar.archive.settings import ArchiveConfig
from keepstep_sidecar.archive.store import Store, open_store
from keepstep_sidecar.archive.survey import ArchivedStep, Survey, Surveyor, remotes
from keepstep_sidecar.depots import Remote

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

    def shards(self, step: ArchivedStep) -> tuple[Remote, ...]:
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

    async def _fault(self, shard: Remote, on_chunk: Callable[[int], None]) -> str:
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
