"""`keepstep stop`: ends a sidecar that lingers."""

from __future__ import annotations

from pathlib import Path

import click

from keepstep.errors import SidecarError, StorageError
from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.run_dir import RunDir


@click.command()
@which_run
@json_option
def stop(directory: Path, run: str | None, as_json: bool) -> None:
    """Make the newest steps durable, end the sidecar of a run and free its memory.

    For a sidecar that stays after a failed command. One whose command still runs ends with it. Also
    frees the memory of a run whose directory was removed.

    \b
    Examples:
      keepstep stop
      keepstep stop --dir /scratch/ckpt --run train
    """
    from keepstep_sidecar.cli import inventory, launcher, output

    for removed in run_dir.removed_runs(directory, run):
        if launcher.free_removed(removed, orphans=True):
            output.echo(f"run {removed.run!r}: its directory was removed; its memory is freed now")
            return
    kept = run_dir.find(directory, run)
    with launcher.supervising(kept):
        stopped = _stop(kept)
    if launcher.slots_left(kept):
        raise StorageError(
            f"run {kept.run!r} stopped, but its newest steps found no volume that takes them: they"
            f" stay in {kept.memory}. The end of {kept.log} tells why; mend that and say `keepstep"
            " stop` again, or delete that directory to give them up"
        )
    held = inventory.read(kept)
    if as_json:
        document = {
            "run": kept.run,
            "stopped": stopped,
            "committed": inventory.document(held.committed),
        }
        output.print_json(document)
        return
    what = "stopped" if stopped else "was not running"
    step = held.committed
    left = "nothing is committed" if step is None else f"step {step.id.step} is in {step.path}"
    output.echo(f"run {kept.run!r} {what}; {left}")


def _stop(kept: RunDir) -> bool:
    """End the run's sidecar; returns whether there was anything to end.

    If a killed sidecar left slots, a new sidecar adopts them first, as they may hold the newest
    steps. Raises UsageError while the run is training, SidecarError.
    """
    from keepstep.processes import Process
    from keepstep_sidecar.cli import calls, launcher, messages, output

    launcher.require_idle(kept)
    live = calls.status(kept.socket)
    for depot in live.depots if live is not None else ():
        if depot.backlog:
            output.echo(messages.waits_for(depot), err=True)
    if launcher.end(kept):
        return True
    if not launcher.slots_left(kept):
        return False
    process = Process.of(launcher.launch(kept))
    if not launcher.wait_up(kept, process):
        tail = launcher.log_tail(kept.log)
        raise SidecarError(
            f"slots are left in {kept.memory}, but no sidecar starts to save them;"
            f" delete that directory to give them up. The end of {kept.log}:\n{tail}"
        )
    return launcher.end(kept)
