"""An archive without a run of one's own: for `keepstep archive` and `export`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from keepstep.errors import ImageError, RestoreError, UsageError
from keepstep.steps import named
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers import transfer
from keepstep_sidecar.tiers.archive.index import ArchivedStep, Survey, Surveyor, remotes, source
from keepstep_sidecar.tiers.archive.read import ArchiveSource
from keepstep_sidecar.tiers.archive.store import Store, open_store
from keepstep_sidecar.tiers.source import Cancel
from keepstep_sidecar.tiers.tier import RemoteShard


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One run in an archive."""

    run: str
    store: Store

    async def survey(self) -> Survey:
        """What the archive holds of the run. Raises StorageError."""
        return await Surveyor(self.store, self.run).survey()

    def shards(self, step: ArchivedStep) -> tuple[RemoteShard, ...]:
        """The shards of a complete step."""
        return remotes(step, run=self.run)

    async def chosen(self, word: str | None, *, sound: bool) -> tuple[ArchivedStep, ...]:
        """Steps by number or by full name. Without a word, all that have a record.

        `sound`: exactly one step, which is complete. Raises UsageError, RestoreError.
        """
        survey = await self.survey()
        if survey.conflict and sound:
            raise RestoreError(survey.conflict)
        whole = [one for one in survey.steps if not one.partial]
        meant = named(word, [one.id for one in whole]) if word is not None else ()
        found = tuple(one for one in whole if word is None or one.id in meant)
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
        """The faults of the shards of a complete step. Raises StorageError."""
        faults = []
        for shard in self.shards(step):
            source = self.source(shard)

            def work(cancel: Cancel, source: ArchiveSource = source) -> None:
                """Verify every byte, with memory for a few chunks."""
                with transfer.opened(source, cancel) as opened:
                    chunks = opened.manifest.chunks
                    transfer.each(opened, chunks, lambda _, data: on_chunk(len(data)))

            try:
                await transfer.run(None, work)
            except ImageError as error:
                faults.append(str(error))
        return faults

    def source(self, shard: RemoteShard) -> ArchiveSource:
        return source(self.store, shard, run=self.run)


@asynccontextmanager
async def opened(config: ArchiveConfig, run: str | None) -> AsyncIterator[Holding]:
    """The named run, or the archive's only run. Raises UsageError, StorageError."""
    store = open_store(config)
    try:
        name = run or await _only_run(store)
        yield Holding(run=name, store=store)
    finally:
        await store.close()


async def _only_run(store: Store) -> str:
    names = await store.directories("")
    if not names:
        raise UsageError(f"{store.where} holds no run")
    if len(names) > 1:
        raise UsageError(
            f"{store.where} holds {len(names)} runs; choose one with --run: {', '.join(names[:10])}"
        )
    return names[0]
