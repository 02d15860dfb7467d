"""`keepstep stop`: end a sidecar that lingers."""

from __future__ import annotations

from pathlib import Path

import click

from keepstep.errors import SidecarError
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.run_dir import Service, find_service


@click.command()
@which_run
@json_option
def stop(directory: Path, run: str | None, as_json: bool) -> None:
    """Make the newest steps durable, end the sidecar of a run and free its memory.

    For a sidecar that stays after a failed command. One whose command still runs ends with it.

    \b
    Examples:
      keepstep stop
      keepstep stop --dir /scratch/ckpt --run train
    """
    from keepstep_sidecar.cli import inventory, launcher, output

    service = find_service(directory, run)
    with launcher.supervising(service.places):
        stopped = _stop(service)
    held = inventory.read(service.places)
    if as_json:
        document = {"run": service.places.run, "stopped": stopped, "committed": held.committed}
        output.print_json(document)
        return
    what = "stopped" if stopped else "was not running"
    step = held.committed
    kept = "nothing is committed" if step is None else f"step {step.id.step} is in {step.path}"
    output.echo(f"run {service.places.run!r} {what}; {kept}")


def _stop(service: Service) -> bool:
    """Slots that a killed sidecar left are adopted first, as they may be the newest steps."""
    from keepstep_sidecar.cli import launcher
    from keepstep_sidecar.cli.processes import Process

    if launcher.end(service.places):
        return True
    if not launcher.slots_left(service.places):
        return False
    process = Process.of(launcher.launch(service))
    if not launcher.wait_up(service.places, process):
        tail = launcher.log_tail(service.places.log)
        raise SidecarError(
            f"slots are left in {service.places.memory}, but no sidecar starts to save them;"
            f" delete that directory to give them up. The end of {service.places.log}:\n{tail}"
        )
    return launcher.end(service.places)
