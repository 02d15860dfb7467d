"""`keepstep-sidecar`: the command line. What serves is `daemon`; the rest asks it or prepares it.

The server is imported only where it serves: a probe runs once a second, and a pod waits for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from keepstep.errors import KeepstepError, StorageError
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.parameters import (
    Command,
    archive_options,
    duration_option,
    keeping_options,
    size_option,
)
from keepstep_sidecar.peer.options import peer_options

SOCKET_NAME = "sidecar.sock"
_PROBE_EVERY_S = 0.02


def _paths(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Path, ...]:
    """Words, not `click.Path`: that would separate those of an environment variable by colons."""
    return tuple(map(Path, values))


def _action(name: str, help: str) -> Callable[[Command], Command]:
    """A flag that makes this process do something else than serve; never from the environment."""
    return click.option(name, is_flag=True, allow_from_autoenv=False, help=help)


@click.command(context_settings={"show_default": True, "auto_envvar_prefix": "KEEPSTEP"})
@click.option("--run", help="Name of the run.")
@click.option(
    "--memory-dir",
    type=click.Path(path_type=Path),
    help="Directory in shared memory, for slots and the socket.",
)
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="DIR",
    callback=_paths,
    help="Directory that holds runs; may be repeated.",
)
@keeping_options
@archive_options
@peer_options
@click.option(
    "--io-threads", type=click.IntRange(min=1), default=4, help="Threads for each volume."
)
@size_option("--bytes-per-second", help="Limit of all writes together, like 500Mi.")
@click.option(
    "--verify",
    type=click.Choice(["full", "seal"]),
    default="full",
    help="What is checked of a shard before it is restored: every byte, or its seal only.",
)
@duration_option("--flush-timeout", default="25s", help="How long a flush may take.")
@duration_option(
    "--linger", default=None, help="End when no trainer was there for so long, like 15m."
)
@click.option(
    "--owner-pid", type=int, help="While this process lives, --linger does not begin to count."
)
@click.option("--report-url", help="Where to tell an operator what this pod holds, https://...")
@click.option("--report-ca", help="PEM: the only authorities that are trusted for --report-url.")
@click.option(
    "--report-token-file",
    type=click.Path(path_type=Path),
    help="Token for --report-url; read anew for each report.",
)
@click.option(
    "--restore-from",
    metavar="STEP",
    help="The next restart goes back to this step, a number or an id; later ones are dead then.",
)
@click.option(
    "--restore-since",
    type=click.IntRange(min=0),
    default=0,
    hidden=True,
    help="Number of the newest epoch when --restore-from was asked for.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    help="TCP port of /metrics and /healthz.  [default: the socket only]",
)
@_action("--probe", "Exit with 0 when the sidecar of --memory-dir answers in --probe-timeout.")
@duration_option("--probe-timeout", default="3s", help="How long --probe waits for an answer.")
@_action("--flush", "Make the sidecar of --memory-dir write its newest steps, and print them.")
@_action("--prepare", "Make each DIR and give it to the sidecar's user; needs root.")
@click.argument("directories", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
def main(
    probe: bool, flush: bool, prepare: bool, directories: tuple[Path, ...], **options: Any
) -> None:
    """Keep one run's steps on this machine: slots in shared memory, shards on volumes.

    Every option can come from the environment, as KEEPSTEP_ and its name: KEEPSTEP_MEMORY_LIMIT,
    KEEPSTEP_VOLUMES (separated by spaces).

    \b
    Examples:
      keepstep-sidecar --run gpt --memory-dir /run/keepstep --volume /nvme0 --volume /nvme1
      keepstep-sidecar --probe
      keepstep-sidecar --flush --flush-timeout 60s
      keepstep-sidecar --prepare /host/nvme0/team-a/gpt/0
    """
    if directories and not prepare:
        raise click.UsageError(f"{directories[0]}: a directory goes with --prepare only")
    if probe + flush + prepare > 1:
        raise click.UsageError("choose one of --probe, --flush and --prepare")
    try:
        if prepare:
            _prepare(directories)
        elif probe:
            sys.exit(0 if _answers(_socket(options), options["probe_timeout"]) else 1)
        elif flush:
            _flush(_socket(options), timeout_s=options["flush_timeout"])
        else:
            _serve(options)
    except KeepstepError as error:
        click.echo(f"keepstep-sidecar: {error}", err=True)
        sys.exit(1)


def _socket(options: dict[str, Any]) -> Path:
    _require(options, "memory_dir")
    directory: Path = options["memory_dir"]
    return directory / SOCKET_NAME


def _answers(path: Path, timeout_s: float) -> bool:
    """Whether a sidecar answers, or does so in time: a pod asks while it still starts."""
    deadline = time.monotonic() + timeout_s
    while not calls.answers(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PROBE_EVERY_S)
    return True


def _require(options: dict[str, Any], *names: str) -> None:
    for name in names:
        if not options[name]:
            flag = "--" + name.replace("_", "-").replace("volumes", "volume")
            raise click.UsageError(f"Missing option '{flag}' (or KEEPSTEP_{name.upper()}).")


def _prepare(directories: Sequence[Path]) -> None:
    from keepstep_sidecar.preparing import prepare

    if not directories:
        raise click.UsageError("--prepare needs at least one DIR")
    for directory in directories:
        prepare(directory)
        click.echo(f"{directory} is ready")


def _flush(path: Path, *, timeout_s: float) -> None:
    """Raises StorageError when something that should be durable is not."""
    flushed = calls.flush(path, timeout_s=timeout_s)
    if flushed is None:
        raise StorageError(f"no sidecar listens on {path}; what it left in memory stays there")
    for id in flushed.steps:
        click.echo(f"step {id} is durable")
    if flushed.reason:
        raise StorageError(f"not everything is durable: {flushed.reason}")
    if not flushed.steps:
        click.echo("nothing is in memory that could be made durable")


def _serve(options: dict[str, Any]) -> None:
    _require(options, "run", "memory_dir", "volumes")
    from keepstep_sidecar.config import Config, Reporting
    from keepstep_sidecar.daemon import serve
    from keepstep_sidecar.shardfile import Verify

    reporting = None
    if options["report_url"]:
        _require(options, "report_ca", "report_token_file")
        reporting = Reporting(
            url=options["report_url"],
            ca=options["report_ca"],
            token_file=options["report_token_file"],
        )
    serve(
        Config(
            run=options["run"],
            memory_dir=options["memory_dir"],
            volumes=tuple(options["volumes"]),
            slots=options["slots"],
            memory_limit_bytes=options["memory_limit"],
            stage_every=options["stage_every"],
            persist_every=options["persist_every"],
            keep=options["keep"],
            capacity_bytes=options["capacity"],
            io_threads=options["io_threads"],
            bytes_per_second=options["bytes_per_second"],
            verify=Verify(options["verify"]),
            flush_timeout_s=options["flush_timeout"],
            linger_s=options["linger"],
            owner_pid=options["owner_pid"],
            metrics_port=options["metrics_port"],
            reporting=reporting,
            archive=options["archive"],
            peers=options["peers"],
            wish=_wish(options["restore_from"], since=options["restore_since"]),
        )
    )


def _wish(text: str | None, *, since: int) -> Any:
    from keepstep_sidecar import rollback

    return rollback.parse(text, since=since) if text else None


if __name__ == "__main__":
    main()
