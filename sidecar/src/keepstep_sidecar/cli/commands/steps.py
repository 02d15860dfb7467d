"""`keepstep steps`: what can be restored, and where it lies."""

from __future__ import annotations

from pathlib import Path

import click

from keepstep_sidecar.cli.inventory import Holdings, Step
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.run_dir import find_service


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
    from keepstep_sidecar.cli import inventory, output

    service = find_service(directory, run)
    held = inventory.read(service.places)
    if as_json:
        output.print_json({"run": service.places.run, "steps": list(map(_document, held.steps))})
        return
    _print(held)


def _document(step: Step) -> dict[str, object]:
    return {
        "id": step.id,
        "epoch": step.id.epoch,
        "step": step.id.step,
        "world": step.world,
        "ranks": step.ranks,
        "bytes": step.bytes,
        "tiers": step.tiers,
        "peer_ranks": step.peer_ranks,
        "archive_ranks": step.archive_ranks,
        "committed": step.committed,
        "dead": step.dead,
        "path": step.path,
    }


def _print(held: Holdings) -> None:
    from keepstep_sidecar.cli import output
    from keepstep_sidecar.cli.quantities import format_size

    beyond = _beyond(held)
    table = output.table(
        "EPOCH", "STEP", "RANKS", "BYTES", "TIERS", *beyond, "COMMITTED", "PATH",
        right=("STEP", "BYTES"),
    )  # fmt: skip
    for at, step in enumerate(held.steps):
        table.add_row(
            str(step.id.epoch),
            str(step.id.step),
            output.ranks_text(step.ranks, step.world),
            format_size(step.bytes),
            ", ".join(map(str, step.tiers)),
            *(output.ranks_text(ranks[at], step.world) for ranks in beyond.values()),
            "dead" if step.dead else "yes" if step.committed else "no",
            str(step.path or ""),
        )
    console = output.console()
    console.print(table if held.steps else "no step is held")
    for problem in held.problems:
        console.print(f"warning: {problem}")


def _beyond(held: Holdings) -> dict[str, list[tuple[int, ...]]]:
    """Columns of the tiers beyond this machine, where there is anything: ranks of each step."""
    columns = {
        "PEER": [step.peer_ranks for step in held.steps],
        "ARCHIVE": [step.archive_ranks for step in held.steps],
    }
    return {name: ranks for name, ranks in columns.items() if any(ranks)}
