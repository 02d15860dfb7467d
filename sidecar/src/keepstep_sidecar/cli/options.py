"""Options that commands share, and the exit codes of errors: 2 for wrong use, 1 for all others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar.cli import output
from keepstep_sidecar.cli.run_dir import checked_name
from keepstep_sidecar.config.keys import Key
from keepstep_sidecar.config.quantities import format_duration, parse_duration, parse_size
from keepstep_sidecar.config.sidecar import values_of

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_DIR: Final = Path(".keepstep")


class Misuse(click.ClickException):
    """A wrong use of the command."""

    exit_code = 2


class Group(click.Group):
    """Lists the commands in the order in which a user needs them, and turns keepstep's errors into
    click's."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeepstepError as error:
            raise self.ending(error) from error

    def ending(self, error: KeepstepError) -> click.ClickException:
        """The click exception that ends this process for `error`."""
        kind = Misuse if isinstance(error, UsageError) else click.ClickException
        return kind(output.printable(str(error)))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def config_options(
    keys: Iterable[Key], *, flags: Iterable[Key] | None = None, **defaults: str
) -> Callable[[Command], Command]:
    """Add `--config FILE` and a flag for each key in `flags`, which defaults to all `keys`.

    The command gets one argument `values`: the values of flags, environment and file, by field.
    `defaults`: the defaults that the help shows instead of a key's own, by name.
    """
    keys = tuple(keys)
    shown = keys if flags is None else tuple(flags)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_values(*args: Any, config: Path | None, **options: Any) -> Any:
            given = {key.name: options.pop(key.name) for key in shown}
            try:
                values = values_of(given, config, keys)
            except UsageError as error:
                raise Misuse(output.printable(str(error))) from error
            return command(*args, values=values, **options)

        made = [_flag(key, defaults.get(key.name, _default(key))) for key in shown]
        outer = functools.reduce(lambda inner, one: one(inner), reversed(made), with_values)
        return cast("Command", _config_option(outer))

    return decorate


_config_option: Final = click.option(
    "--config",
    envvar="KEEPSTEP_CONFIG",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML with any of these options, like persist_every = 10. Flags and the environment"
    " (KEEPSTEP_PERSIST_EVERY) count before it.",
)


def _flag(key: Key, default: str) -> Callable[[Any], Any]:
    return click.option(
        key.flag,
        key.name,
        default=None,
        multiple=key.several,
        is_flag=not key.kind.metavar,
        metavar=key.kind.metavar or None,
        hidden=key.hidden,
        help=key.help + (f"  [default: {default}]" if default else ""),
    )


def _default(key: Key) -> str:
    """The default that the help shows; '' if there is none to show."""
    if key.required:
        return ""
    if key.field.endswith("_s") and key.default is not None:
        return format_duration(key.default)
    return "" if key.default in (None, (), False) else str(key.default)


def _parsed(parse: Callable[[str], Any]) -> Callable[..., Any]:
    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except (ValueError, UsageError) as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def duration_option(*names: str, **options: Any) -> Callable[[Command], Command]:
    """An option in seconds, written like `90s`, `15m`, `2h`."""
    return click.option(*names, metavar="DURATION", callback=_parsed(parse_duration), **options)


def size_option(*names: str, **options: Any) -> Callable[[Command], Command]:
    """An option in bytes, written like `512Mi`, `5GB`."""
    return click.option(*names, metavar="SIZE", callback=_parsed(_positive_size), **options)


def _positive_size(text: str) -> int:
    if (size_bytes := parse_size(text)) < 1:
        raise ValueError(f"{text!r} is no size that holds anything")
    return size_bytes


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


def run_option(*, default: str) -> Callable[[Command], Command]:
    """`--run NAME`. `default`: what the help says about the option's default."""
    return click.option(
        "--run",
        "run",
        metavar="NAME",
        callback=_parsed(checked_name),
        help=f"Name of the run.  [default: {default}]",
    )


def which_run(command: Command) -> Command:
    """Add `--dir` and `--run`, which name a run that exists already."""
    return directory_option(run_option(default="the only one in DIR")(command))
