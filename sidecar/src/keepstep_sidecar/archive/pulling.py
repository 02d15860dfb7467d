"""Fetches an archived step into a local directory, so that it can be interrupted and go on.

A shard grows under a hidden name; what is in it already is proved by the digests, chunk by chunk,
so nothing is believed because a file has the right length. A step's directory gets its name when
all its shards are whole: readers never see a part.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from keepstep.errors import DigestError, RestoreError, StorageError
from keepstep.image import check_chunk, chunk_bounds
from keepstep_sidecar.archive.holdings import Holding
from keepstep_sidecar.archive.reading import in_parallel
from keepstep_sidecar.archive.survey import ArchivedStep
from keepstep_sidecar.depots import Remote
from keepstep_sidecar.filesystem import Filesystem


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
    holding: Holding, shard: Remote, directory: Path, on_chunk: Callable[[int], None]
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
