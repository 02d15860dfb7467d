"""The group `keepstep`."""

from __future__ import annotations

import click

from keepstep_sidecar import __version__
from keepstep_sidecar.cli.commands.archive import archive
from keepstep_sidecar.cli.commands.doctor import doctor
from keepstep_sidecar.cli.commands.export import export
from keepstep_sidecar.cli.commands.inspect import inspect_file
from keepstep_sidecar.cli.commands.run import run, start, stop
from keepstep_sidecar.cli.commands.secret import secret
from keepstep_sidecar.cli.commands.status import status
from keepstep_sidecar.cli.commands.steps import pin, rm, steps, unpin, verify
from keepstep_sidecar.cli.commands.ui import ui
from keepstep_sidecar.cli.options import CommandGroup


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="keepstep")
def cli() -> None:
    """Keep every step of a PyTorch training run, and go on from the newest after a crash.

    \b
    Examples:
      keepstep run -- torchrun --nproc-per-node 8 train.py
      keepstep status
      keepstep steps --json
      keepstep verify

    Commands find a run by --dir (default ./.keepstep) and --run (default: the only one there).
    """


for _command in (
    *(run, start, status, steps, ui, verify, inspect_file, archive, export, doctor, rm, stop),
    *(pin, unpin, secret),
):
    cli.add_command(_command)
