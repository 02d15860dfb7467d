"""`keepstep verify`: read every byte of a step again and compare it with its digest."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep.errors import DigestError, ImageError, UsageError, VersionError
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.quantities import format_duration, format_size
from keepstep_sidecar.cli.run_dir import Places, find_service

if TYPE_CHECKING:
    from keepstep_sidecar.cli.inventory import Step
    from keepstep_sidecar.volume.scan import LocalShard, Refused


@click.command()
@which_run
@json_option
@click.argument("word", required=False, metavar="[STEP]")
def verify(directory: Path, run: str | None, as_json: bool, word: str | None) -> None:
    """Verify the shards of STEP, or of all committed steps; exit 1 on the first bad digest.

    STEP is a number, or a full name as in `keepstep steps`. Nothing is changed or moved.

    \b
    Examples:
      keepstep verify
      keepstep verify 1200
    """
    from keepstep_sidecar.cli import output

    places = find_service(directory, run).places
    began = time.monotonic()
    shards, problems = _selected(places, word)
    try:
        for problem in problems:
            raise problem.error
        _verify_all(shards, quiet=as_json)
    except ImageError as error:
        if not as_json:
            raise
        output.print_json({"verified": False, **_bad(error)})
        raise SystemExit(1) from None
    seconds, total = time.monotonic() - began, sum(shard.size_bytes for shard in shards)
    steps = sorted({shard.step_id for shard in shards})
    if as_json:
        output.print_json({"verified": True, "steps": steps, "bytes": total, "seconds": seconds})
        return
    named = f"{len(steps)} steps" if len(steps) != 1 else f"step {steps[0].step}"
    files = f"{len(shards)} shards" if len(shards) != 1 else "1 shard"
    click.echo(
        f"{named}, {files}, {format_size(total)}: every digest is right"
        f" ({format_duration(seconds)})"
    )


def _bad(error: ImageError) -> dict[str, object]:
    chunk, tensors = (error.chunk, error.tensors) if isinstance(error, DigestError) else (None, ())
    return {
        "path": None if error.path is None else str(error.path),
        "chunk": chunk,
        "tensors": tensors,
        "error": error.reason,
    }


def _selected(places: Places, word: str | None) -> tuple[list[LocalShard], list[Refused]]:
    """Shards to verify, and files among them that are none already by their seals.

    Raises UsageError when there is nothing to verify.
    """
    from keepstep_sidecar.cli import inventory

    shards, problems = inventory.survey(places)
    steps = inventory.of_shards(shards, ())
    refused = [one for one in problems if not isinstance(one.error, VersionError)]
    wanted = _wanted(steps, refused, word)
    if not wanted and not refused:
        raise UsageError(f"run {places.run!r} has no committed step to verify")
    names = {str(step.id) for step in wanted} | ({word} if word else set())
    if word is not None:
        refused = [one for one in refused if one.path.parent.name in names]
    return [shard for shard in shards if str(shard.step_id) in names], refused


def _wanted(
    steps: Sequence[Step], refused: Sequence[Refused], word: str | None
) -> tuple[Step, ...]:
    from keepstep_sidecar.cli import inventory

    if word is None:
        return tuple(step for step in steps if step.committed)
    if any(one.path.parent.name == word for one in refused):  # perhaps all its shards are bad
        return tuple(step for step in steps if str(step.id) == word)
    return inventory.chosen(steps, (word,))


def _verify_all(shards: Sequence[LocalShard], *, quiet: bool) -> None:
    """Raises ImageError, naming file, chunk and tensors."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from keepstep.image.xxh3 import CHUNK_BYTES
    from keepstep_sidecar.cli import output

    console = output.console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = console.is_terminal and not quiet
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task("verify", total=sum(shard.size_bytes for shard in shards))
        for shard in shards:
            name = f"step {shard.step_id.step} rank {shard.rank}"
            progress.update(task, description=name)
            verify_shard(shard, lambda _: progress.advance(task, CHUNK_BYTES))


def verify_shard(shard: LocalShard, on_chunk: Callable[[int], None]) -> None:
    """Check one file against its digests. Raises ImageError.

    A file that the sidecar published or retired meanwhile is found by its new name, or let go.
    """
    from keepstep.image import verify_image

    fd = _open(shard)
    if fd is None:
        return
    try:
        # not closed here: a DigestError's traceback still refers to pieces of it
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        mapping.madvise(mmap.MADV_SEQUENTIAL)
        verify_image(
            memoryview(mapping),
            shard.layout,
            path=shard.path,
            on_chunk=on_chunk,
            id=shard.step_id,
        )
    finally:
        # gigabytes that nobody reads again would push the training's data out of memory
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _open(shard: LocalShard) -> int | None:
    published = shard.path.parents[2] / str(shard.step_id) / shard.path.name
    for path in (shard.path, published):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
