"""`keepstep steps`: lists the steps of a run, and the tiers that hold them."""

from __future__ import annotations

from pathlib import Path

import click

from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.cli.inventory import Holdings
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.config.quantities import format_size


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

    kept = run_dir.seen(directory, run)
    held = inventory.read(kept)
    if as_json:
        shown = list(map(inventory.document, held.steps))
        output.print_json({"run": kept.run, "steps": shown})
        return
    beyond = _beyond(held)
    columns = ("EPOCH", "STEP", "RANKS", "BYTES", "TIERS", *beyond, "COMMITTED", "HEALTH", "PATH")
    rows = (
        (
            step.id.epoch,
            step.id.step,
            output.ranks_text(inventory.ranks_of(step), step.world),
            format_size(step.bytes),
            ", ".join(map(str, inventory.tiers_of(step))),
            *(output.ranks_text(ranks[at], step.world) for ranks in beyond.values()),
            "dead" if step.dead else "yes" if step.committed else "no",
            "suspect" if step.suspect else "proven" if step.proven else "",
            step.path,
        )
        for at, step in enumerate(held.steps)
    )
    output.print_table(columns, rows, right=("STEP", "BYTES"), empty="no step is held")
    output.print_lines(f"warning: {problem}" for problem in held.problems)


def _beyond(held: Holdings) -> dict[str, list[tuple[int, ...]]]:
    """The columns of the tiers beyond this machine, without empty ones: the ranks of each step."""
    columns = {
        "PEER": [step.peer_ranks for step in held.steps],
        "ARCHIVE": [step.archive_ranks for step in held.steps],
    }
    return {name: ranks for name, ranks in columns.items() if any(ranks)}
