"""Options that commands share, and the exit codes of errors: 2 for wrong use, 1 for all others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar.cli import output
from keepstep_sidecar.cli.run_dir import check_run_name
from keepstep_sidecar.config.settings import Command, parsing_callback


class _Misuse(click.ClickException):
    exit_code = 2


class CommandGroup(click.Group):
    """Lists the commands in the order in which a user needs them, and turns keepstep's errors into
    click's."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeepstepError as error:
            kind = _Misuse if isinstance(error, UsageError) else click.ClickException
            raise kind(output.printable(str(error))) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


directory_option: Final = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".keepstep"),
    help="Where runs are kept.  [default: ./.keepstep]",
)

json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
)


def run_option(*, default: str) -> Callable[[Command], Command]:
    """`--run NAME`. `default`: what the help says about the option's default."""
    return click.option(
        "--run",
        "run",
        metavar="NAME",
        callback=parsing_callback(check_run_name),
        help=f"Name of the run.  [default: {default}]",
    )


def which_run(command: Command) -> Command:
    """Add `--dir` and `--run`, which name a run that exists already."""
    return directory_option(run_option(default="the only one in DIR")(command))
