"""`keepstep steps`: lists the steps of a run, and the tiers that hold them."""

from __future__ import annotations

from pathlib import Path

import click

from keepstep.steps import NEAREST_FIRST, Tier
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
    columns = (
        "EPOCH",
        "STEP",
        "RANKS",
        "BYTES",
        "TIERS",
        *(str(tier).upper() for tier in beyond),
        "COMMITTED",
        "HEALTH",
        "PATH",
    )
    rows = (
        (
            step.id.epoch,
            step.id.step,
            output.ranks_text(step.held, step.world),
            format_size(step.bytes),
            ", ".join(map(str, step.ranks)),
            *(output.ranks_text(step.ranks.get(tier, ()), step.world) for tier in beyond),
            "dead" if step.dead else "yes" if step.committed else "no",
            "suspect" if step.suspect else "proven" if step.proven else "",
            step.path,
        )
        for step in held.steps
    )
    output.print_table(columns, rows, right=("STEP", "BYTES"), empty="no step is held")
    output.print_lines(f"warning: {problem}" for problem in held.problems)


def _beyond(held: Holdings) -> list[Tier]:
    """The tiers beyond this machine that hold something, nearest first."""
    there = {tier for step in held.steps for tier in step.ranks}
    return [
        tier for tier in NEAREST_FIRST if tier in there and tier not in (Tier.MEMORY, Tier.LOCAL)
    ]
