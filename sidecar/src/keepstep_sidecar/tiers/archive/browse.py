"""An archive without a run of one's own: list, verify and pull for `keepstep archive`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from keepstep.directory import OpenDirectory
from keepstep.errors import ImageError, RestoreError, StorageError, UsageError
from keepstep.steps import steps_named
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.archive.archive_source import ArchiveSource
from keepstep_sidecar.tiers.archive.index import (
    ArchiveContents,
    ArchivedStep,
    Surveyor,
    archive_source_of,
    remote_shards,
)
from keepstep_sidecar.tiers.archive.store import Store, open_store
from keepstep_sidecar.tiers.incoming_copy import IncomingCopy, part_name
from keepstep_sidecar.tiers.remote_tier import RemoteShard
from keepstep_sidecar.tiers.source import ReadCancellation, ShardSource
from keepstep_sidecar.volume.files import Filesystem, IoMode
from keepstep_sidecar.volume.run_tree import ShardName


@dataclass(frozen=True, kw_only=True)
class ArchivedRun:
    """One run in an archive."""

    run: str
    store: Store

    async def survey(self) -> ArchiveContents:
        """What the archive holds of the run. Raises StorageError."""
        return await Surveyor(self.store, self.run).survey()

    def shards(self, step: ArchivedStep) -> tuple[RemoteShard, ...]:
        """The shards of a complete step."""
        return remote_shards(step, run=self.run)

    async def chosen(self, word: str | None, *, sound: bool) -> tuple[ArchivedStep, ...]:
        """Steps by number or by full name. Without a word, all that have a record.

        `sound`: exactly one step, which is complete. Raises UsageError, RestoreError.
        """
        survey = await self.survey()
        if survey.conflict and sound:
            raise RestoreError(survey.conflict)
        whole = [step for step in survey.steps if not step.has_no_record]
        meant = steps_named(word, [step.id for step in whole]) if word is not None else ()
        found = tuple(step for step in whole if word is None or step.id in meant)
        place = f"{self.store.where}/{self.run}"
        if not found:
            what = f"step {word}" if word is not None else "any step"
            raise UsageError(f"{place} does not hold {what}; `keepstep archive ls` lists them")
        if sound and len(found) > 1:
            names = ", ".join(str(step.id) for step in found)
            raise UsageError(f"{word} is ambiguous in {place}: choose one of {names}")
        if sound and found[0].fault:
            raise RestoreError(f"step {word} cannot be restored: {found[0].fault}")
        return found

    async def verify(self, step: ArchivedStep, *, on_chunk: Callable[[int], None]) -> list[str]:
        """The faults of the shards of a complete step. Raises StorageError."""
        faults = []
        for at in self._sources(step):

            def work(cancel: ReadCancellation, at: ShardSource = at) -> None:
                """Verify every byte, with memory for a few chunks."""
                with verified_chunks.open_verified(at, cancel) as opened:
                    chunks = opened.manifest.chunk_indices
                    verified_chunks.for_each_verified(
                        opened, chunks, lambda _, data: on_chunk(len(data))
                    )

            try:
                await verified_chunks.run_cancellable(None, work)
            except ImageError as error:
                faults.append(str(error))
        return faults

    def _sources(self, step: ArchivedStep) -> Iterator[ShardSource]:
        for at in map(self.source, self.shards(step)):
            yield at
            if at.beside is not None:
                yield at.beside

    def source(self, shard: RemoteShard) -> ArchiveSource:
        return archive_source_of(self.store, shard, run=self.run)


@asynccontextmanager
async def open_archived_run(config: ArchiveConfig, run: str | None) -> AsyncIterator[ArchivedRun]:
    """The named run, or the archive's only run. Raises UsageError, StorageError."""
    store = open_store(config)
    try:
        name = run or await _only_run(store)
        yield ArchivedRun(run=name, store=store)
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


# --- pull ------------------------------------------------------------------------------------
#
# Fetches an archived step into a local directory. It can be interrupted and continued: each shard
# is an `IncomingCopy`. A step's directory gets its name when all its shards are whole, so readers
# never see a part.


async def pull_step(
    holding: ArchivedRun, step: ArchivedStep, target: Path, *, on_chunk: Callable[[int], None]
) -> Path:
    """Fetch the step to `<target>/<step>`; returns that path. Raises StorageError, ImageError,
    RestoreError when the name is taken."""
    final = target / str(step.id)
    growing = target / f".{step.id}.pulling"
    try:
        place = OpenDirectory.open_path(Path(os.path.realpath(target)), make=True)
        if place.lstat(final.name) is not None:
            raise RestoreError(f"{final} exists already; move it away, or verify it as it is")
        place.make(growing.name)
        directory = place.open_subdirectory(growing.name)
        for at in map(holding.source, holding.shards(step)):
            name = ShardName.of(at.shard)
            if at.beside is not None:
                await _pull(
                    at.beside, directory.path / name.base_shard_name.file, directory, on_chunk
                )
            await _pull(at, directory.path / name.file, directory, on_chunk)
        await asyncio.to_thread(_finish, place, directory, final.name)
    except OSError as error:
        raise StorageError(f"cannot write {growing}: {error}") from error
    return final


async def _pull(
    at: ShardSource, path: Path, directory: OpenDirectory, on_chunk: Callable[[int], None]
) -> None:
    filesystem = Filesystem()
    filesystem.open_root(directory)

    def work(cancel: ReadCancellation) -> None:
        with verified_chunks.open_verified(at, cancel) as opened:
            if filesystem.lstat(path) is not None:  # its bytes are not trusted because of its name
                filesystem.rename(path, path.with_name(part_name(path.name)))
            copy = IncomingCopy(
                path, opened.manifest, filesystem=filesystem, engine=IoMode.BUFFERED
            )

            def write(chunk: int, data: memoryview) -> None:
                copy.write(chunk, data, whose=at.where)
                on_chunk(len(data))

            with contextlib.closing(copy):
                copy.scan_existing_chunks()
                missing = copy.missing
                for chunk in set(opened.manifest.chunk_indices).difference(missing):
                    begin, end = opened.manifest.bounds_of_chunk(chunk)
                    on_chunk(end - begin)
                verified_chunks.for_each_verified(opened, missing, write, threads=at.streams)
                copy.seal()

    await verified_chunks.run_cancellable(None, work)


def _finish(place: OpenDirectory, directory: OpenDirectory, name: str) -> None:
    directory.sync()
    place.rename(directory.path.name, name)
    place.sync()
