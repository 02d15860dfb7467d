"""`keepstep archive`: the steps in the archive. Works on any machine, without a sidecar."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keepstep.errors import ImageError, RestoreError, StorageError, UsageError
from keepstep_sidecar.cli import output, run_dir
from keepstep_sidecar.cli.options import directory_option, json_option, run_option
from keepstep_sidecar.cli.run_dir import check_run_name
from keepstep_sidecar.config.settings import Command, format_duration, format_size
from keepstep_sidecar.config.sidecar import SETTINGS, ArchiveConfig, setting_options

if TYPE_CHECKING:
    from keepstep_sidecar.tiers.archive.browse import ArchivedRun
    from keepstep_sidecar.tiers.archive.index import ArchivedStep

T = TypeVar("T")


_WHERE = ("archive", "archive_endpoint", "archive_region")


def add_archive_options(command: Command) -> Command:
    """Add the options that name an archive, or a run in DIR whose archive is meant."""
    placed = directory_option(run_option(default="the only one in the archive")(command))
    return setting_options([setting for setting in SETTINGS if setting.name in _WHERE])(placed)


def _config(
    values: dict[str, Any], directory: Path, run: str | None
) -> tuple[ArchiveConfig, str | None]:
    """The archive that `values` name, and the run if one is named. Raises UsageError."""
    if (archive := archive_of(values)) is not None:
        return archive, run
    kept = run_dir.find_run(directory, run)
    raise UsageError(
        f"where are the steps of run {kept.name!r} archived? Name the place with --archive, or take"
        f" all settings of its record with --config {kept.record}"
    )


def archive_of(values: Mapping[str, Any]) -> ArchiveConfig | None:
    """The archive that these values of keys name, by field; None without one. Raises UsageError."""
    if "archive" not in values:
        return None
    endpoint, region = (values.get(f"archive_{key}") for key in ("endpoint", "region"))
    return ArchiveConfig(url=values["archive"], endpoint=endpoint, region=region)


def _with_archive(
    config: ArchiveConfig, run: str | None, work: Callable[[ArchivedRun], Awaitable[T]]
) -> T:
    """Open the archive, find the run, and do `work`."""
    from keepstep_sidecar.tiers.archive import browse

    async def main() -> T:
        async with browse.open_archived_run(config, run and check_run_name(run)) as holding:
            return await work(holding)

    return asyncio.run(main())


@click.group()
def archive() -> None:
    """List, verify and fetch the steps of an archive. Needs no sidecar.

    \b
    Examples:
      keepstep archive ls --archive s3://ckpt/runs
      keepstep archive verify 12000
      keepstep archive pull 12000 ./restored
    """


@archive.command()
@add_archive_options
@json_option
def ls(as_json: bool, **where: Any) -> None:
    """List the steps of a run, complete or not, and say what is wrong.

    \b
    Examples:
      keepstep archive ls
      keepstep archive ls --archive /mnt/archive --run gpt --json
    """
    config, run = _config(**where)

    async def work(holding: ArchivedRun) -> tuple[str, Any]:
        return holding.run, await holding.survey()

    name, survey = _with_archive(config, run, work)
    if as_json:
        steps = list(map(_document, survey.steps))
        about = {"run": name, "origin": survey.fork_origin, "conflict": survey.conflict}
        output.print_json({**about, "steps": steps})
        return
    output.print_table(
        ("EPOCH", "STEP", "RANKS", "BYTES", "WRITTEN", "ARCHIVED"),
        map(_row, survey.steps),
        right=("BYTES",),
        empty=f"no step of run {name!r} is archived",
    )
    if survey.fork_origin:
        output.print_lines([f"run {name} began from {survey.fork_origin}"])
    output.print_lines(f"warning: {text}" for text in (survey.conflict, *survey.faults) if text)


def _row(step: ArchivedStep) -> tuple[str, ...]:
    written = ""
    if step.record is not None:
        written = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(step.record.written_at))
    state = "yes" if step.complete else "damaged" if step.fault else "in part"
    world = (
        f"all {step.record.world}" if step.complete and step.record else f"{len(step.shard_files)}"
    )
    size = format_size(step.stored_bytes)
    return str(step.id.epoch), str(step.id.step), world, size, written, state


def _document(step: ArchivedStep) -> dict[str, object]:
    return {
        "id": step.id,
        "step": step.id.step,
        "epoch": step.id.epoch,
        "world": step.record.world if step.record else None,
        "shards": len(step.shard_files),
        "bytes": step.stored_bytes,
        "written_at": step.record.written_at if step.record else None,
        "complete": step.complete,
        "fault": step.fault,
    }


@archive.command()
@add_archive_options
@json_option
@click.argument("word", required=False, metavar="[STEP]")
def verify(word: str | None, as_json: bool, **where: Any) -> None:
    """Read every byte of STEP, or of all archived steps, and compare it with its digest.

    Exit code 1 when anything is wrong; each thing is named. Nothing is changed.

    \b
    Examples:
      keepstep archive verify
      keepstep archive verify 12000 --archive s3://ckpt/runs --run gpt
    """
    config, run = _config(**where)
    began = time.monotonic()

    async def work(holding: ArchivedRun) -> tuple[list[str], list[str], int]:
        steps = await holding.chosen(word, sound=False)
        faults = [step.fault for step in steps if step.fault]
        sound = [step for step in steps if step.complete]
        total = sum(step.image_bytes for step in sound)
        with output.progress(total, quiet=as_json) as advance:
            for step in sound:
                done = functools.partial(advance, f"step {step.id.step}")
                faults += await holding.verify(step, on_chunk=done)
        return [str(step.id) for step in steps], faults, total

    names, faults, total = _with_archive(config, run, work)
    seconds = time.monotonic() - began
    if as_json:
        result = {"verified": not faults, "steps": names, "faults": faults, "bytes": total}
        output.print_json({**result, "seconds": seconds})
        raise SystemExit(1 if faults else 0)
    if faults:
        raise StorageError("\n".join(faults))
    steps = "1 step" if len(names) == 1 else f"{len(names)} steps"
    click.echo(f"{steps}, {format_size(total)}: every digest is right ({format_duration(seconds)})")


@archive.command()
@add_archive_options
@click.argument("word", metavar="STEP")
@click.argument("target", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
def pull(word: str, target: Path, **where: Any) -> None:
    """Fetch STEP into DIR, verified, as DIR/<step>: a committed step's directory.

    Stock safetensors and torch.distributed.checkpoint read it. Started again after an
    interruption it fetches what is missing only.

    \b
    Examples:
      keepstep archive pull 12000 ./restored
      keepstep archive pull 12000 ./restored --archive s3://ckpt/runs --run gpt
    """
    config, run = _config(**where)

    async def work(holding: ArchivedRun) -> Path:
        from keepstep_sidecar.tiers.archive.browse import pull_step

        (step,) = await holding.chosen(word, sound=True)
        with output.progress(step.image_bytes, quiet=False) as advance:
            done = functools.partial(advance, f"step {step.id.step}")
            return await pull_step(holding, step, target, on_chunk=done)

    try:
        path = _with_archive(config, run, work)
    except ImageError as error:
        raise RestoreError(f"not fetched: {error}") from error
    click.echo(str(path))
