"""Options that every command shares, and click callbacks for sizes, durations and names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click

from keepstep.core.retention import Retention
from keepstep.errors import UsageError
from keepstep_sidecar.cli.quantities import parse_duration, parse_size
from keepstep_sidecar.cli.run_dir import checked_name
from keepstep_sidecar.config.archive import ArchiveConfig

Command = TypeVar("Command", bound=Callable[..., Any])
T = TypeVar("T")

DEFAULT_DIR: Final = Path(".keepstep")


def _parsed(
    parse: Callable[[str], T],
) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> T | None:
        try:
            return None if value is None else parse(value)
        except (ValueError, UsageError) as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def size_option(*names: str, help: str) -> Callable[[Command], Command]:
    """An option in bytes, written like `512Mi`, `32Gi`, `10G`; None when not given."""
    return click.option(*names, metavar="SIZE", callback=_parsed(parse_size), help=help)


def duration_option(*names: str, default: str | None, help: str) -> Callable[[Command], Command]:
    """An option in seconds, written like `90s`, `15m`, `2h`."""
    return click.option(
        *names,
        metavar="DURATION",
        default=default,
        show_default=True,
        callback=_parsed(parse_duration),
        help=help,
    )


def run_option(*, default: str) -> Callable[[Command], Command]:
    """`--run NAME`; `default` is what the help says about leaving it out."""
    return click.option(
        "--run",
        "run",
        metavar="NAME",
        callback=_parsed(checked_name),
        help=f"Name of the run.  [default: {default}]",
    )


def keeping_options(command: Command) -> Command:
    """What is kept, and where it must fit: the options of the sidecar that `keepstep run` has.
    What stays on the volumes comes as one argument `keep`: Retention."""

    @functools.wraps(command)
    def with_retention(*args: Any, **options: Any) -> Any:
        options["keep"] = _retention(options["keep"], options.pop("keep_every"))
        return command(*args, **options)

    outer = functools.reduce(lambda inner, one: one(inner), reversed(_KEEPING), with_retention)
    return cast("Command", outer)


def _retention(last: int, every: tuple[int | None, float | None] | None) -> Retention:
    steps, seconds = every or (None, None)
    return Retention(last=last, every_steps=steps, every_s=seconds)


def _steps_or_seconds(text: str) -> tuple[int | None, float | None]:
    steps = int(text) if text.isdecimal() else None
    seconds = parse_duration(text) if steps is None else None
    if not (steps or seconds):
        raise ValueError(f"{text!r} keeps nothing; write a number of steps, or a time like 6h")
    return steps, seconds


_KEEPING: Final[tuple[Callable[[Any], Any], ...]] = (
    click.option(
        "--slots",
        type=click.IntRange(min=2),
        default=4,
        show_default=True,
        help="Images of each rank in memory; with 4 a restart always finds a common step there.",
    ),
    size_option(
        "--memory-limit",
        help="Memory for all slots, like 32Gi.  [default: what the shared memory has]",
    ),
    click.option(
        "--stage-every",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="K",
        help="Stage every Kth step in memory.",
    ),
    click.option(
        "--persist-every",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="K",
        help="Make every Kth step durable.",
    ),
    click.option(
        "--keep",
        type=click.IntRange(min=1),
        default=2,
        show_default=True,
        metavar="N",
        help="Newest committed steps that stay on the volumes.",
    ),
    click.option(
        "--keep-every",
        metavar="K|DURATION",
        callback=_parsed(_steps_or_seconds),
        help="Keep every Kth step there, too, or the first of every DURATION, like 6h.",
    ),
    size_option("--capacity", help="Limit of each volume, like 400Gi.  [default: the drive]"),
)


def archive_options(command: Command) -> Command:
    """Where the archive is and what goes there, as one argument `archive`: ArchiveConfig | None."""

    @functools.wraps(command)
    def with_archive(*args: Any, **options: Any) -> Any:
        told = {name: options.pop(f"archive_{name}") for name in _ARCHIVE_WORDS}
        try:
            options["archive"] = _archive(options.pop("archive"), **told)
        except UsageError as error:
            raise click.UsageError(str(error)) from error
        return command(*args, **options)

    outer = functools.reduce(lambda inner, one: one(inner), reversed(_ARCHIVE), with_archive)
    return cast("Command", outer)


_ARCHIVE_WORDS: Final = ("every", "keep", "keep_every", "endpoint", "region")


def _archive(
    url: str | None,
    *,
    every: int,
    keep: int,
    keep_every: tuple[int | None, float | None] | None,
    endpoint: str | None,
    region: str | None,
) -> ArchiveConfig | None:
    if not url:
        return None
    url = url if "://" in url else os.path.abspath(url)
    retention = _retention(keep, keep_every)
    return ArchiveConfig(
        url=url, every=every, endpoint=endpoint, region=region, retention=retention
    )


_ARCHIVE: Final[tuple[Callable[[Any], Any], ...]] = (
    click.option(
        "--archive",
        envvar="KEEPSTEP_ARCHIVE",
        metavar="URL",
        help="Where steps outlive every machine: s3://bucket/prefix, gs://..., az://... or a"
        " directory that others see, too. Credentials come from the environment.",
    ),
    click.option(
        "--archive-every",
        envvar="KEEPSTEP_ARCHIVE_EVERY",
        type=click.IntRange(min=1),
        default=1000,
        show_default=True,
        metavar="K",
        help="Archive every Kth step.",
    ),
    click.option(
        "--archive-keep",
        envvar="KEEPSTEP_ARCHIVE_KEEP",
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
        metavar="N",
        help="Newest steps that stay in the archive.",
    ),
    click.option(
        "--archive-keep-every",
        envvar="KEEPSTEP_ARCHIVE_KEEP_EVERY",
        metavar="K|DURATION",
        callback=_parsed(_steps_or_seconds),
        help="Keep every Kth step, too, or the first of every DURATION, like 6h.",
    ),
    click.option(
        "--archive-endpoint",
        envvar="KEEPSTEP_ARCHIVE_ENDPOINT",
        metavar="URL",
        help="Address of an S3 store that is not Amazon's, like https://s3.example.com.",
    ),
    click.option(
        "--archive-region",
        envvar="KEEPSTEP_ARCHIVE_REGION",
        metavar="NAME",
        help="Region of the S3 store.",
    ),
)


directory_option: Final = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DIR,
    help="Where runs are kept.  [default: ./.keepstep]",
)

json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
)


def which_run(command: Command) -> Command:
    """Add `--dir` and `--run`, which name a run that exists already."""
    return directory_option(run_option(default="the only one in DIR")(command))
