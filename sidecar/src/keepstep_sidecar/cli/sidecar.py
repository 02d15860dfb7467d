"""The group `keepstep-sidecar`: `serve` and `agent` serve; the others query or prepare a sidecar.

Only the commands that serve import the servers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from keepstep.errors import StorageError, UsageError
from keepstep_sidecar import __version__
from keepstep_sidecar.cli.options import CommandGroup
from keepstep_sidecar.cli.probe import probe
from keepstep_sidecar.config.settings import Setting, size_option
from keepstep_sidecar.config.sidecar import SETTINGS, Config, OperatorAccess, setting_options


class _Program(CommandGroup):
    """Runs `serve` when no command is given: pods are configured by their environment alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help", "--version"):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


def _named(*names: str) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.name.startswith(names)]


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
@setting_options(SETTINGS)
def serve(values: dict[str, Any]) -> None:
    """Be the sidecar of a run (also without a command).

    \b
    Examples:
      keepstep-sidecar serve --run gpt --memory-dir /run/keepstep --volume /nvme0
      keepstep-sidecar serve --config keepstep.toml
    """
    config = Config.from_values(values)
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
@setting_options(_named("memory_dir", "flush_timeout"))
def flush(values: dict[str, Any]) -> None:
    """Make the newest steps of the sidecar of --memory-dir durable, and print them.

    \b
    Examples:
      keepstep-sidecar flush
      keepstep-sidecar flush --flush-timeout 60s
    """
    from keepstep_sidecar.cli import calls

    path = _socket(values)
    flushed = calls.ask_flush(path, timeout_s=values.get("flush_timeout_s", Config.flush_timeout_s))
    if flushed is None:
        raise StorageError(f"no sidecar listens on {path}; what it left in memory stays there")
    for step_id in flushed.steps:
        click.echo(f"step {step_id} is durable")
    if flushed.reason:
        raise StorageError(f"not everything is durable: {flushed.reason}")
    if not flushed.steps:
        click.echo("nothing is in memory that could be made durable")


@program.command(hidden=True)
@setting_options(_named("run", "memory_dir"))
@click.option("--fd", type=int, required=True, help="A listening socket.")
def page(values: dict[str, Any], fd: int) -> None:
    """Show the run in a browser to those who show KEEPSTEP_UI_SECRET; ends when it is not used.

    The sidecar starts it.
    """
    from keepstep_sidecar.cli import output, run_page_data
    from keepstep_sidecar.ui.server import serve_pod

    read = run_page_data.sidecar_reader(_socket(values))
    asyncio.run(serve_pod(fd, values["run"], read=read, text=output.printable))


@program.command()
@_directories
@click.option(
    "--compile-cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Make this one too, for what trainers compile.",
)
@size_option("--compile-cache-limit", default="4Gi", help="Remove a user's caches beyond that.")
def prepare(
    directories: tuple[Path, ...], compile_cache: Path | None, compile_cache_limit: int
) -> None:
    """Make each DIR and give it to the sidecar's user; needs root.

    \b
    Example:
      keepstep-sidecar prepare /host/nvme0/team-a/gpt/0
    """
    from keepstep_sidecar.agent.run_directories import prepare_cache, prepare_directory

    for directory in directories:
        prepare_directory(directory)
        click.echo(f"{directory} is ready")
    if compile_cache is not None:
        try:
            prepare_cache(compile_cache, limit_bytes=compile_cache_limit)
        except StorageError as error:  # the pod trains without it
            click.echo(f"no compile cache is kept: {error}", err=True)


@program.group()
def agent() -> None:
    """Be the agent of a node, for what runs left on its drives."""


@agent.command("serve")
@setting_options(_named("peer_listen", "report_url", "report_ca_file", "report_token_file"))
@_directories
def agent_serve(values: dict[str, Any], directories: tuple[Path, ...]) -> None:
    """Serve each run what its pods left below each DIR, a hostPath.

    \b
    Example:
      keepstep-sidecar agent serve --peer-listen :26741 --report-url https://... /host/0
    """
    from keepstep_sidecar.agent.left_shards_server import serve

    needed = ("peer_listen", "report_url", "report_ca_file", "report_token_file")
    if missing := [f"--{name.replace('_', '-')}" for name in needed if name not in values]:
        raise click.UsageError(f"Missing {', '.join(missing)}.")
    authorities: Path = values["report_ca_file"]
    reporting = OperatorAccess(
        url=values["report_url"],
        ca=authorities.read_text(),
        ca_file=authorities,
        token_file=values["report_token_file"],
    )
    serve(values["peer_listen"], reporting, directories)


@agent.command("clean")
@click.option(
    "--after",
    type=click.FloatRange(min=0),
    required=True,
    metavar="SECONDS",
    help="Remove what is left of a run whose CheckpointRun is gone for so long.",
)
@_directories
def agent_clean(directories: tuple[Path, ...], after: float) -> None:
    """Remove what gone runs left below each DIR, a hostPath; as root, until it is ended.

    \b
    Example:
      keepstep-sidecar agent clean --after 86400 /host/0
    """
    from keepstep_sidecar.agent import clean

    clean.run_cleaner(directories, grace_s=after)


program.add_command(probe)
