"""`keepstep verify`: reads every byte of a step again and compares it with its digest."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep.errors import DigestError, ImageError, UsageError, VersionError
from keepstep.wire.status import StepStatus
from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.config.quantities import format_duration, format_size

if TYPE_CHECKING:
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

    kept = run_dir.seen(directory, run)
    began = time.monotonic()
    shards, problems = _selected(kept, word)
    total = sum(shard.size_bytes for shard in shards)
    try:
        for problem in problems:
            raise problem.error
        with output.progress(total, quiet=as_json) as advance:
            for shard in shards:
                verify_shard(
                    shard,
                    functools.partial(advance, f"step {shard.step_id.step} rank {shard.rank}"),
                    run=kept.config.run,
                )
    except ImageError as error:
        if not as_json:
            raise
        output.print_json({"verified": False, **_bad(error)})
        raise SystemExit(1) from None
    seconds = time.monotonic() - began
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


def _selected(kept: RunDir, word: str | None) -> tuple[list[LocalShard], list[Refused]]:
    """The shards to verify, and the files of these steps that the scan has already refused.

    Raises UsageError if there is nothing to verify.
    """
    from keepstep_sidecar.cli import inventory

    shards, problems = inventory.survey(kept)
    steps = inventory.of_shards(shards, ())
    refused = [one for one in problems if not isinstance(one.error, VersionError)]
    wanted = _wanted(steps, refused, word)
    if not wanted and not refused:
        raise UsageError(f"run {kept.run!r} has no committed step to verify")
    names = {str(step.id) for step in wanted} | ({word} if word else set())
    if word is not None:
        refused = [one for one in refused if one.path.parent.name in names]
    return [shard for shard in shards if str(shard.step_id) in names], refused


def _wanted(
    steps: Sequence[StepStatus], refused: Sequence[Refused], word: str | None
) -> tuple[StepStatus, ...]:
    from keepstep_sidecar.cli import inventory

    if word is None:
        return tuple(step for step in steps if step.committed)
    if any(one.path.parent.name == word for one in refused):  # all its shards may be bad
        return tuple(step for step in steps if str(step.id) == word)
    return inventory.chosen(steps, (word,))


def verify_shard(shard: LocalShard, on_bytes: Callable[[int], None], *, run: str) -> None:
    """Check one file against its digests. Raises ImageError.

    If the sidecar has published the file meanwhile, it is found by its new name. If the sidecar has
    retired it, it is skipped.
    """
    from keepstep_sidecar.cli import inventory
    from keepstep_sidecar.tiers import transfer

    source = inventory.source(shard, run=run)
    with contextlib.suppress(FileNotFoundError), transfer.opened(source) as opened:
        chunks = opened.manifest.chunks
        transfer.each(opened, chunks, lambda _, data: on_bytes(len(data)))
