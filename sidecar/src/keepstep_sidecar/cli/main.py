"""The group `keepstep`, and how its errors leave: 2 for a wrong use, 1 for everything else."""

from __future__ import annotations

from typing import Any

import click

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar import __version__
from keepstep_sidecar.cli import output
from keepstep_sidecar.cli.commands.archive import archive
from keepstep_sidecar.cli.commands.inspect import inspect_file
from keepstep_sidecar.cli.commands.rm import rm
from keepstep_sidecar.cli.commands.run import run
from keepstep_sidecar.cli.commands.status import status
from keepstep_sidecar.cli.commands.steps import steps
from keepstep_sidecar.cli.commands.stop import stop
from keepstep_sidecar.cli.commands.verify import verify


class _Misuse(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeepstepError as error:
            kind = _Misuse if isinstance(error, UsageError) else click.ClickException
            raise kind(output.printable(str(error))) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as added: in the order in which a user meets them


@click.group(
    cls=_Group,
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


for _command in (run, status, steps, verify, inspect_file, archive, rm, stop):
    cli.add_command(_command)
