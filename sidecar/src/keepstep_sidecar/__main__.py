"""`keepstep-sidecar`: the command line. What serves is `daemon`; the rest asks it or prepares it.

The server is imported only where it serves: a probe runs once a second, and a pod waits for it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from keepstep.errors import KeepstepError, SidecarError, StorageError
from keepstep.wire.reports import STILL_USED_EXIT
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.options import (
    Command,
    archive_options,
    duration_option,
    keeping_options,
    size_option,
)
from keepstep_sidecar.cli.peer_options import peer_options

SOCKET_NAME = "sidecar.sock"
_PROBE_EVERY_S = 0.02
_OF_DIRECTORIES = ("prepare", "serve", "clean")
_ACTIONS = ("probe", "started", "healthy", "flush", *_OF_DIRECTORIES)


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
    metavar="[RUN/]STEP",
    help="The next restart goes back to this step, a number or an id; later ones are dead then. Of"
    " another RUN, from its archive: where this run begins.",
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
@_action("--started", "Wait for the same, and exit with 0 in any case: the start hook of a pod.")
@_action("--healthy", "Exit with 0 when it answers, and no scan and no volume of it fails.")
@duration_option(
    "--probe-timeout", default="3s", help="How long --probe, --started, --healthy wait for it."
)
@_action("--flush", "Make the sidecar of --memory-dir write its newest steps, and print them.")
@_action("--prepare", "Make each DIR and give it to the sidecar's user; needs root.")
@_action("--serve", "Serve what pods that left this node have in each DIR, for the run's others.")
@_action("--clean", "Remove each DIR, <volume>/<namespace>/<run> of a run that is gone; as root.")
@click.option(
    "--gone-since",
    type=float,
    default=None,
    metavar="UNIX",
    allow_from_autoenv=False,
    help="With --clean: exit with 3, and remove nothing, if the run wrote anything after that.",
)
@click.argument("directories", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
def main(directories: tuple[Path, ...], **options: Any) -> None:
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
    chosen = [name for name in _ACTIONS if options.pop(name)]
    if len(chosen) > 1:
        raise click.UsageError(f"choose one of {_flags(_ACTIONS)}")
    action = chosen[0] if chosen else ""
    if options["gone_since"] is not None and action != "clean":
        raise click.UsageError("--gone-since goes with --clean only")
    if bool(directories) is not (action in _OF_DIRECTORIES):
        raise click.UsageError(
            f"--{action} needs at least one DIR"
            if action
            else f"{directories[0]}: a directory goes with {_flags(_OF_DIRECTORIES)} only"
        )
    try:
        _do(action, directories, options)
    except KeepstepError as error:
        click.echo(f"keepstep-sidecar: {error}", err=True)
        sys.exit(1)


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _do(action: str, directories: tuple[Path, ...], options: dict[str, Any]) -> None:
    if action == "prepare":
        _prepare(directories)
    elif action == "clean":
        _clean(directories, options["gone_since"])
    elif action == "serve":
        _serve_left(directories, options)
    elif action == "probe":
        sys.exit(0 if _answers(_socket(options), options["probe_timeout"]) else 1)
    elif action == "started":
        _await_start(options)
    elif action == "healthy":
        _check_health(_socket(options), options["probe_timeout"])
    elif action == "flush":
        _flush(_socket(options), timeout_s=options["flush_timeout"])
    else:
        _serve(options)


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


def _await_start(options: dict[str, Any]) -> None:
    """A hook that fails has the kubelet end the sidecar, and no trainer begins before that one has
    started: so whatever is wrong is said, and never in the way of the training."""
    try:
        timeout_s: float = options["probe_timeout"]
        if not _answers(path := _socket(options), timeout_s):
            text = f"no sidecar answers on {path} within {timeout_s:g} s"
        else:
            text = calls.health(path) or "the sidecar answers"
    except Exception as error:
        text = f"cannot tell whether the sidecar has started: {error!r}"
    click.echo(f"keepstep-sidecar: {text}; training begins", err=True)


def _check_health(path: Path, timeout_s: float) -> None:
    """Raises SidecarError that says what is wrong."""
    if not _answers(path, timeout_s):
        raise SidecarError(f"no sidecar answers on {path}", code="absent")
    found = calls.health(path, timeout_s=timeout_s)
    if found is None:
        raise SidecarError(f"the sidecar on {path} does not answer any more", code="absent")
    if found:
        raise SidecarError(found)
    click.echo("ok")


def _require(options: dict[str, Any], *names: str) -> None:
    for name in names:
        if not options[name]:
            flag = "--" + name.replace("_", "-").replace("volumes", "volume")
            flag = flag.replace("--peers", "--peer-listen")
            raise click.UsageError(f"Missing option '{flag}' (or KEEPSTEP_{name.upper()}).")


def _prepare(directories: Sequence[Path]) -> None:
    from keepstep_sidecar.volume.prepare import prepare

    for directory in directories:
        prepare(directory)
        click.echo(f"{directory} is ready")


def _clean(directories: Sequence[Path], gone_since: float | None) -> None:
    from keepstep_sidecar.relay.clean import StillUsedError, clean

    since = math.inf if gone_since is None else gone_since
    try:
        for directory in directories:
            click.echo(f"{directory}: {clean(directory, gone_since=since)} files removed")
    except StillUsedError as error:
        click.echo(f"keepstep-sidecar: {error}", err=True)
        sys.exit(STILL_USED_EXIT)


def _serve_left(directories: tuple[Path, ...], options: dict[str, Any]) -> None:
    from keepstep_sidecar.relay.serve import Serving, serve

    _require(options, "run", "peers", "report_url")
    reporting = _reporting(options)
    assert reporting is not None, "required above"
    serve(
        Serving(
            run=options["run"],
            directories=directories,
            peers=options["peers"],
            reporting=reporting,
        )
    )


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
    from keepstep_sidecar.app import serve
    from keepstep_sidecar.config.sidecar import Config
    from keepstep_sidecar.config.verify import Verify

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
            reporting=_reporting(options),
            archive=options["archive"],
            peers=options["peers"],
            **_restore_from(options),
        )
    )


def _reporting(options: dict[str, Any]) -> Any:
    from keepstep_sidecar.config.sidecar import Reporting

    if not options["report_url"]:
        return None
    _require(options, "report_ca", "report_token_file")
    return Reporting(
        url=options["report_url"],
        ca=options["report_ca"],
        token_file=options["report_token_file"],
    )


def _restore_from(options: dict[str, Any]) -> dict[str, Any]:
    """Back to a step of this run, or on from one of another."""
    from keepstep_sidecar.config import fork
    from keepstep_sidecar.config.restore_from import parse

    text: str = (options["restore_from"] or "").removeprefix(f"{options['run']}/")
    if "/" in text:
        return {"fork": fork.parse(text)}
    return {"wish": parse(text, since=options["restore_since"])} if text else {}


if __name__ == "__main__":
    main()
