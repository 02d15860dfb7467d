"""`keepstep-sidecar`: `app` and `relay` serve; the other commands query or prepare a sidecar.

Only the commands that serve import the servers: a probe runs once a second, and a pod waits for it.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from pathlib import Path
from typing import Any

import click

from keepstep.errors import SidecarError, StorageError, UsageError
from keepstep.wire.reports import STILL_USED_EXIT
from keepstep_sidecar import __version__
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.options import Group, duration_option
from keepstep_sidecar.config.settings import Setting
from keepstep_sidecar.config.sidecar import SETTINGS, Config, options

_PROBE_EVERY_S = 0.02


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
def main() -> None:
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


@main.command()
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


@main.command()
@options(_named("memory_dir"))
@duration_option(
    "--timeout",
    "timeout_s",
    envvar="KEEPSTEP_PROBE_TIMEOUT",
    default="3s",
    show_default=True,
    help="How long to wait for it.",
)
@click.option(
    "--healthy", is_flag=True, help="Also fail when a scan or a volume of it does, and say why."
)
@click.option("--started", is_flag=True, help="Exit with 0 in any case: the start hook of a pod.")
def probe(values: dict[str, Any], timeout_s: float, healthy: bool, started: bool) -> None:
    """Exit with 0 when the sidecar of --memory-dir answers in time.

    \b
    Examples:
      keepstep-sidecar probe
      keepstep-sidecar probe --healthy
      keepstep-sidecar probe --started --timeout 120s
    """
    found = None
    try:
        path = _socket(values)
        found = _answer(path, timeout_s)
        text = f"no sidecar answers on {path} within {timeout_s:g} s" if found is None else found
    except Exception as error:
        if not started:
            raise
        text = f"cannot tell whether the sidecar has started: {error!r}"
    if started:
        # If the start hook fails, the kubelet ends the sidecar, and no trainer starts before the
        # sidecar has. So an error is printed here but never keeps the training from starting.
        click.echo(f"{text or 'the sidecar answers'}; training begins", err=True)
    elif found is None or (healthy and found):
        raise SidecarError(text, code="absent")
    elif healthy:
        click.echo("ok")


def _socket(values: dict[str, Any]) -> Path:
    if "memory_dir" not in values:
        raise click.UsageError("Missing option '--memory-dir' (or KEEPSTEP_MEMORY_DIR).")
    directory: Path = values["memory_dir"]
    return directory / "sidecar.sock"


def _answer(path: Path, timeout_s: float) -> str | None:
    """Like `calls.health`, but retries until the timeout: the sidecar may still be starting."""
    deadline = time.monotonic() + timeout_s
    while (found := calls.health(path)) is None and time.monotonic() < deadline:
        time.sleep(_PROBE_EVERY_S)
    return found


@main.command()
@options(_named("memory_dir", "flush_timeout"))
def flush(values: dict[str, Any]) -> None:
    """Make the newest steps of the sidecar of --memory-dir durable, and print them.

    \b
    Examples:
      keepstep-sidecar flush
      keepstep-sidecar flush --flush-timeout 60s
    """
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


@main.command(hidden=True)
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


@main.command()
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


@main.command()
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


@main.command()
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


if __name__ == "__main__":
    main(prog_name="keepstep-sidecar")
