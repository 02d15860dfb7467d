"""The group `keepstep-sidecar`: `serve` and `relay` serve; the others query or prepare a sidecar.

Only the commands that serve import the servers.
"""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from typing import Any

import click

from keepstep.errors import StorageError, UsageError
from keepstep.wire.reports import STILL_USED_EXIT
from keepstep_sidecar import __version__
from keepstep_sidecar.cli.options import Group
from keepstep_sidecar.cli.probe import probe
from keepstep_sidecar.config.settings import Setting
from keepstep_sidecar.config.sidecar import SETTINGS, Config, options


class _Program(Group):
    """Runs `serve` when no command is given: pods are configured by their environment alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help", "--version"):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


def _named(*names: str) -> list[Setting]:
    return [one for one in SETTINGS if one.name.startswith(names)]


_directories = click.argument(
    "directories", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR..."
)


@click.group(cls=_Program, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="keepstep-sidecar")
def program() -> None:
    """Keep one run's steps on this machine: slots in shared memory, shards on volumes.

    Every option can come from the environment, as KEEPSTEP_ and its name (KEEPSTEP_MEMORY_LIMIT;
    KEEPSTEP_VOLUMES, separated by spaces), or from a file: keepstep-sidecar serve --help.

    \b
    Examples:
      keepstep-sidecar --run gpt --memory-dir /run/keepstep --volume /nvme0 --volume /nvme1
      keepstep-sidecar serve --config keepstep.toml
      keepstep-sidecar probe
      keepstep-sidecar flush --flush-timeout 60s
      keepstep-sidecar prepare /host/nvme0/team-a/gpt/0
    """


@program.command()
@options(SETTINGS)
def serve(values: dict[str, Any]) -> None:
    """Be the sidecar of a run (also without a command).

    \b
    Examples:
      keepstep-sidecar serve --run gpt --memory-dir /run/keepstep --volume /nvme0
      keepstep-sidecar serve --config keepstep.toml
    """
    config = Config.of(values)
    from keepstep_sidecar import app

    try:
        app.serve(config)
    except UsageError as error:  # a directory that another sidecar uses: the words are right
        raise click.ClickException(str(error)) from error


def _socket(values: dict[str, Any]) -> Path:
    if "memory_dir" not in values:
        raise click.UsageError("Missing option '--memory-dir' (or KEEPSTEP_MEMORY_DIR).")
    directory: Path = values["memory_dir"]
    return directory / "sidecar.sock"


@program.command()
@options(_named("memory_dir", "flush_timeout"))
def flush(values: dict[str, Any]) -> None:
    """Make the newest steps of the sidecar of --memory-dir durable, and print them.

    \b
    Examples:
      keepstep-sidecar flush
      keepstep-sidecar flush --flush-timeout 60s
    """
    from keepstep_sidecar.cli import calls

    path = _socket(values)
    flushed = calls.flush(path, timeout_s=values.get("flush_timeout_s", Config.flush_timeout_s))
    if flushed is None:
        raise StorageError(f"no sidecar listens on {path}; what it left in memory stays there")
    for step_id in flushed.steps:
        click.echo(f"step {step_id} is durable")
    if flushed.reason:
        raise StorageError(f"not everything is durable: {flushed.reason}")
    if not flushed.steps:
        click.echo("nothing is in memory that could be made durable")


@program.command(hidden=True)
@options(_named("run", "memory_dir"))
@click.option("--fd", type=int, required=True, help="A listening socket.")
def page(values: dict[str, Any], fd: int) -> None:
    """Show the run in a browser to those who show KEEPSTEP_UI_SECRET; ends when it is not used.

    The sidecar starts it.
    """
    from keepstep_sidecar.cli import output, run_pages
    from keepstep_sidecar.ui.server import serve_pod

    read = run_pages.sidecar_reader(_socket(values))
    asyncio.run(serve_pod(fd, values["run"], read=read, text=output.printable))


@program.command()
@_directories
def prepare(directories: tuple[Path, ...]) -> None:
    """Make each DIR and give it to the sidecar's user; needs root.

    \b
    Example:
      keepstep-sidecar prepare /host/nvme0/team-a/gpt/0
    """
    from keepstep_sidecar.relay.directories import prepare

    for directory in directories:
        prepare(directory)
        click.echo(f"{directory} is ready")


@program.command()
@options(_named("run", "peer", "report"))
@_directories
def relay(values: dict[str, Any], directories: tuple[Path, ...]) -> None:
    """Serve what pods that left this node have in each DIR, for the run's others.

    \b
    Example:
      keepstep-sidecar relay --run gpt --peer-listen :9465 --report-url https://... /nvme0/gpt/1
    """
    # A relay has no slots, so it needs no memory. It serves from the directories.
    config = Config.of({**values, "memory_dir": Path("/"), "volumes": directories})
    if config.peer_settings is None or config.reporting is None:
        raise click.UsageError("Missing options '--peer-listen' and '--report-url'.")
    from keepstep_sidecar.relay.serve import Serving, serve

    serve(
        Serving(
            run=config.run,
            directories=directories,
            peers=config.peer_settings,
            reporting=config.reporting,
        )
    )


@program.command()
@click.option(
    "--gone-since",
    type=float,
    default=math.inf,
    metavar="UNIX",
    help="Exit with 3, and remove nothing, if the run wrote anything after that.",
)
@_directories
def clean(directories: tuple[Path, ...], gone_since: float) -> None:
    """Remove each DIR, <volume>/<namespace>/<run> of a run that is gone; as root.

    \b
    Example:
      keepstep-sidecar clean --gone-since 1767225600 /host/0/team-a/gpt
    """
    from keepstep_sidecar.relay.directories import StillUsedError, clean

    try:
        for directory in directories:
            click.echo(f"{directory}: {clean(directory, gone_since=gone_since)} files removed")
    except StillUsedError as error:
        click.echo(f"keepstep-sidecar: {error}", err=True)
        sys.exit(STILL_USED_EXIT)


program.add_command(probe)
