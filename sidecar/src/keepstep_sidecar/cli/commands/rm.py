"""`keepstep rm`: deletes steps from the volumes of a run that is not running."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from keepstep.errors import UsageError
from keepstep.wire.status import StepStatus
from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.config.quantities import format_size


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
    from keepstep_sidecar.cli import inventory, launcher, output

    kept = run_dir.find(directory, run)
    with launcher.supervising(kept):
        held = inventory.read(kept)
        if held.live is not None:
            raise UsageError(
                f"the sidecar of run {kept.run!r} (pid {held.live.pid}) owns its steps; end it"
                " first with `keepstep stop`"
            )
        doomed = inventory.chosen(held.steps, words)
        if not force:
            _refuse_the_last(held.steps, doomed)
        if not yes:
            _confirm(kept, doomed)
        freed_bytes = _retire(kept, doomed)
    if as_json:
        output.print_json({"removed": [step.id for step in doomed], "freed_bytes": freed_bytes})
    else:
        names = ", ".join(str(one.id) for one in doomed)
        where = ", ".join(map(str, kept.roots))
        output.echo(f"removed {names} from {where}: {format_size(freed_bytes)}")


def _refuse_the_last(steps: Sequence[StepStatus], doomed: Sequence[StepStatus]) -> None:
    """Raises UsageError if `doomed` has all the committed steps that are not dead."""
    committed = {step.id for step in steps if step.committed and not step.dead}
    lost = committed & {step.id for step in doomed}
    if lost and lost == committed:
        raise UsageError(
            f"{', '.join(map(str, sorted(lost)))} would leave no committed step to restore; pass"
            " --force to delete it all the same"
        )


def _confirm(kept: RunDir, doomed: Sequence[StepStatus]) -> None:
    from keepstep_sidecar.cli import output

    output.echo(f"run {kept.run!r} in {', '.join(map(str, kept.roots))}:", err=True)
    for step in doomed:
        state = "dead" if step.dead else "committed" if step.committed else "not committed"
        output.echo(f"{step.id}  {format_size(step.bytes)}  {state}  {step.path}", err=True)
    click.confirm("Delete?", abort=True, err=True)


def _retire(kept: RunDir, doomed: Sequence[StepStatus]) -> int:
    """Delete the steps. Returns the bytes freed. Raises StorageError."""
    from keepstep_sidecar.volume.volume import Volume

    with ExitStack() as stack:
        volumes = []
        for root in kept.roots:
            if root.is_dir():
                volumes.append(Volume(root, run=kept.run))
                stack.callback(volumes[-1].close)
        return sum(volume.retire(step.id, reuse=False) for step in doomed for volume in volumes)
