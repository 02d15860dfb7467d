"""`keepstep steps`, `verify` and `rm`: lists, checks and deletes the steps of a run."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep.errors import DigestError, ImageError, UsageError, VersionError
from keepstep.steps import IN_POD, NEAREST_FIRST
from keepstep_sidecar.cli import calls, compile_caches, inventory, output, run_dir, sidecar_launcher
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.config.settings import format_duration, format_size

if TYPE_CHECKING:
    from keepstep_sidecar.volume.run_tree import LocalShard, RefusedFile


@click.command()
@which_run
@json_option
def steps(directory: Path, run: str | None, as_json: bool) -> None:
    """List the steps that are held, in memory, on the volumes, and beyond this machine.

    Works beside a running sidecar and without one; then only the volumes are listed.

    \b
    Examples:
      keepstep steps
      keepstep steps --json | jq -r '.steps[] | select(.committed) | .path'
    """
    kept = run_dir.find_run_to_read(directory, run)
    held = inventory.read_holdings(kept)
    if as_json:
        shown = list(map(inventory.step_document, held.steps))
        output.print_json({"run": kept.name, "steps": shown})
        return
    there = {tier for step in held.steps for tier in step.ranks}.difference(IN_POD)
    beyond = sorted(there, key=NEAREST_FIRST.index)
    names = (str(tier).upper() for tier in beyond)
    rows = (
        (
            step.id.epoch,
            step.id.step,
            output.ranks_text(step.holding_ranks, step.world),
            format_size(step.bytes),
            ", ".join(map(str, step.ranks)),
            *(output.ranks_text(step.ranks.get(tier, ()), step.world) for tier in beyond),
            "dead" if step.dead else "yes" if step.committed else "no",
            "suspect" if step.suspect else "proven" if step.proven else "",
            step.path,
        )
        for step in held.steps
    )
    output.print_table(
        ("EPOCH", "STEP", "RANKS", "BYTES", "TIERS", *names, "COMMITTED", "HEALTH", "PATH"),
        rows,
        right=("STEP", "BYTES"),
        empty="no step is held",
    )
    output.print_lines(f"warning: {problem}" for problem in held.problems)


# --- verify ----------------------------------------------------------------------------------


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
    kept = run_dir.find_run_to_read(directory, run)
    began = time.monotonic()
    selected, problems = _selected(kept, word)
    shards = [*selected, *_bases(selected)]
    total = sum(shard.size_bytes for shard in shards)
    try:
        for problem in problems:
            raise problem.error
        with output.progress(total, quiet=as_json) as advance:
            for shard in shards:
                about = f"step {shard.step_id.step} rank {shard.rank}"
                _verify_shard(shard, functools.partial(advance, about), run=kept.name)
    except ImageError as error:
        if not as_json:
            raise
        digest = error if isinstance(error, DigestError) else None
        bad = {
            "path": None if error.path is None else str(error.path),
            "chunk": digest and digest.chunk,
            "tensors": digest.tensors if digest else (),
            "error": error.reason,
        }
        output.print_json({"verified": False, **bad})
        raise SystemExit(1) from None
    seconds = time.monotonic() - began
    steps = sorted({shard.step_id for shard in selected})
    if as_json:
        output.print_json({"verified": True, "steps": steps, "bytes": total, "seconds": seconds})
        return
    named = f"{len(steps)} steps" if len(steps) != 1 else f"step {steps[0].step}"
    files = f"{len(shards)} shards" if len(shards) != 1 else "1 shard"
    output.print_line(
        f"{named}, {files}, {format_size(total)}: every digest is right"
        f" ({format_duration(seconds)})"
    )


def _selected(kept: RunDir, word: str | None) -> tuple[list[LocalShard], list[RefusedFile]]:
    """The shards to verify, and the files of these steps that the scan has already refused.

    Raises UsageError if there is nothing to verify.
    """
    shards, problems = inventory.survey_volumes(kept)
    steps = inventory.compute_step_statuses(shards, ())
    refused = [problem for problem in problems if not isinstance(problem.error, VersionError)]
    if word is None:
        names = {str(step.id) for step in steps if step.committed}
    else:
        # of a full name, all shards may be bad
        bad = any(refusal.path.parent.name == word for refusal in refused)
        names = {
            word,
            *(str(status.id) for status in (() if bad else inventory.choose_steps(steps, (word,)))),
        }
        refused = [refusal for refusal in refused if refusal.path.parent.name in names]
    if not names and not refused:
        raise UsageError(f"run {kept.name!r} has no committed step to verify")
    return [shard for shard in shards if str(shard.step_id) in names], refused


def _bases(shards: Iterable[LocalShard]) -> Iterator[LocalShard]:
    """The bases of these shards; each file once, whatever names it has."""
    seen: set[tuple[int, int]] = set()
    for base in (shard.base_shard for shard in shards):
        if base is None:
            continue
        with contextlib.suppress(OSError):  # its step was retired meanwhile
            found = base.path.lstat()
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                yield base


def _verify_shard(shard: LocalShard, on_bytes: Callable[[int], None], *, run: str) -> None:
    """Check one file against its digests. Raises ImageError.

    If the sidecar has published the file meanwhile, it is found by its new name. If the sidecar has
    retired it, it is skipped.
    """
    from keepstep_sidecar.tiers import verified_chunks
    from keepstep_sidecar.tiers.source import ShardGone, file_source

    with (
        contextlib.suppress(ShardGone),
        verified_chunks.open_verified(file_source(shard, run=run)) as opened,
    ):
        chunks = opened.manifest.chunk_indices
        verified_chunks.for_each_verified(opened, chunks, lambda _, data: on_bytes(len(data)))


# --- rm --------------------------------------------------------------------------------------


@click.command()
@which_run
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Delete the only committed step too.")
@json_option
@click.argument("words", nargs=-1, required=True, metavar="STEP...")
def rm(
    directory: Path, run: str | None, yes: bool, force: bool, as_json: bool, words: tuple[str, ...]
) -> None:
    """Delete steps from the volumes.

    STEP is a number, or a full name as in `keepstep steps` when several epochs have that number.
    The run must not be running: its sidecar deletes old steps by itself (`run --keep`).

    \b
    Examples:
      keepstep rm 1200
      keepstep rm --yes 0003.1f9c2d7a-000001200
    """
    from keepstep_sidecar.volume.volume import Volume

    kept = run_dir.find_run(directory, run)
    where = ", ".join(map(str, kept.roots))
    with sidecar_launcher.hold_supervision(kept):
        held = inventory.read_holdings(kept)
        if held.live is not None:
            raise UsageError(
                f"the sidecar of run {kept.name!r} (pid {held.live.pid}) owns its steps; end it"
                " first with `keepstep stop`"
            )
        doomed = inventory.choose_steps(held.steps, words)
        committed = {step.id for step in held.steps if step.committed and not step.dead}
        lost = committed & {step.id for step in doomed}
        if lost and lost == committed and not force:
            raise UsageError(
                f"{', '.join(map(str, sorted(lost)))} would leave no committed step to restore;"
                " pass --force to delete it all the same"
            )
        if not yes:
            output.print_line(f"run {kept.name!r} in {where}:", err=True)
            for step in doomed:
                state = "dead" if step.dead else "committed" if step.committed else "not committed"
                output.print_line(
                    f"{step.id}  {format_size(step.bytes)}  {state}  {step.path}", err=True
                )
            click.confirm("Delete?", abort=True, err=True)
        with contextlib.ExitStack() as stack:
            volumes = [
                stack.enter_context(contextlib.closing(Volume(root, run=kept.name)))
                for root in kept.roots
                if root.is_dir()
            ]
            freed_bytes = sum(
                volume.delete_step(step.id, reuse=False) for step in doomed for volume in volumes
            )
        if {status.id for status in doomed} == {step.id for step in held.steps}:
            compile_caches.remove_caches(kept)
    if as_json:
        output.print_json({"removed": [step.id for step in doomed], "freed_bytes": freed_bytes})
    else:
        names = ", ".join(str(status.id) for status in doomed)
        output.print_line(f"removed {names} from {where}: {format_size(freed_bytes)}")


# --- pin and unpin ---------------------------------------------------------------------------


@click.command()
@which_run
@json_option
@click.argument("word", metavar="STEP")
def pin(directory: Path, run: str | None, as_json: bool, word: str) -> None:
    """Keep a step until it is unpinned: on the volumes of all machines, and in the archive.

    STEP is a number, or a full name as in `keepstep steps`. The run's sidecar must be there.

    \b
    Examples:
      keepstep pin 1200
      keepstep pin --run gpt 0003.1f9c2d7a-000001200
    """
    _pin(directory, run, word, as_json=as_json, pinned=True)


@click.command()
@which_run
@json_option
@click.argument("word", metavar="STEP")
def unpin(directory: Path, run: str | None, as_json: bool, word: str) -> None:
    """Let a pinned step go when its turn comes.

    \b
    Example:
      keepstep unpin 1200
    """
    _pin(directory, run, word, as_json=as_json, pinned=False)


def _pin(directory: Path, run: str | None, word: str, *, as_json: bool, pinned: bool) -> None:
    kept = run_dir.find_run(directory, run)
    (step,) = inventory.choose_steps(inventory.read_holdings(kept).steps, (word,))
    answer = calls.ask_pin(kept.socket, step.id, pinned=pinned)
    if answer is None:
        raise UsageError(f"run {kept.name!r} has no sidecar now; pin its steps while it runs")
    if as_json:
        output.print_json({"pinned": list(answer.steps)})
    else:
        output.print_line(f"pinned: {', '.join(map(str, answer.steps)) or 'no step'}")
