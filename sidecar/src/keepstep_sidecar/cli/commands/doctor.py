"""`keepstep doctor`: whether this machine has what a run needs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import click

from keepstep.errors import KeepstepError
from keepstep_sidecar.cli import inventory, machine, output, run_dir
from keepstep_sidecar.cli.machine import Finding, Need, Outcome
from keepstep_sidecar.cli.options import directory_option, json_option, size_option
from keepstep_sidecar.cli.run_dir import RunDir

_SLOTS = 4


@click.command()
@directory_option
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A drive that a run would have; several times.  [default: --dir]",
)
@size_option("--state", help="Of one rank: weights and optimizer.  [default: the run in DIR says]")
@click.option(
    "--ranks", type=click.IntRange(1), help="On this machine.  [default: as the run, or 1]"
)
@size_option("--probe-size", default="256Mi", help="Written to measure.  [default: 256Mi]")
@json_option
def doctor(
    directory: Path,
    volumes: tuple[Path, ...],
    state: int | None,
    ranks: int | None,
    probe_size: int,
    as_json: bool,
) -> None:
    """Check this machine: memory, huge pages, drives, versions; say what to change.

    Each line is `ok`, `slow` (a run works, but slower or less safe than it could) or `missing` (it
    would fail); exit code 1 when anything is missing. Nothing is changed: a file is written to each
    drive to measure it, and is gone afterwards.

    \b
    Examples:
      keepstep doctor
      keepstep doctor --volume /nvme0 --volume /nvme1 --state 40Gi --ranks 8
      keepstep doctor --dir /scratch/ckpt --json
    """
    kept = _kept(directory)
    need = _need(kept, state, ranks)
    known = (directory,) if kept is None else kept.config.volumes
    places = tuple(one.absolute() for one in volumes or known)
    found = []
    for one in _findings(need, places, probe_size):
        found.append(one)
        if not as_json:
            output.print_lines([_line(one)])
    failed = any(one.outcome is Outcome.MISSING for one in found)
    if as_json:
        output.print_json({"ok": not failed, "checks": found})
    if failed:
        raise SystemExit(1)


def _line(one: Finding) -> str:
    change = f"\n{'':9}change: {one.change}" if one.change else ""
    return f"{one.outcome!s:<9}{one.name}: {one.found}{change}"


def _findings(need: Need, volumes: tuple[Path, ...], probe_bytes: int) -> Iterator[Finding]:
    yield from machine.versions()
    yield machine.shared_memory(run_dir.SHARED_MEMORY, need)
    yield machine.huge_pages(need)
    yield machine.memory_lock(need)
    yield machine.remove_ipc(Path("/"), os.getuid())
    for volume in volumes:
        yield from machine.drive(
            volume,
            need,
            volumes=len(volumes),
            probe_bytes=probe_bytes,
            clock=time.monotonic,
        )


def _kept(directory: Path) -> RunDir | None:
    """The run in `directory`, if there is exactly one."""
    with contextlib.suppress(KeepstepError):
        return run_dir.find(directory, None)
    return None


def _need(kept: RunDir | None, state: int | None, ranks: int | None) -> Need:
    """What a run needs: from the options, else from the newest step of the run."""
    if kept is None:
        return Need(image_bytes=state, ranks=ranks or 1, slots=_SLOTS)
    shards = inventory.survey(kept)[0]
    newest = max((one.step_id for one in shards), default=None)
    images = {one.rank: one.size_bytes for one in shards if one.step_id == newest}
    return Need(
        image_bytes=state or max(images.values(), default=None),
        ranks=ranks or len(images) or 1,
        slots=kept.config.slots,
        slots_made_bytes=_slots_bytes(kept),
        kept_bytes={
            volume: sum(one.size_bytes for one in shards if one.path.is_relative_to(volume))
            for volume in kept.config.volumes
        },
    )


def _slots_bytes(kept: RunDir) -> int:
    places = filter(None, (kept.memory, kept.config.huge_pages_dir))
    sizes = [_size_bytes(file) for place in places for file in place.glob("rank-*/*")]
    return sum(sizes)


def _size_bytes(file: Path) -> int:
    with contextlib.suppress(OSError):  # the run may go on, and remove slots
        return file.stat().st_blocks * 512
    return 0
