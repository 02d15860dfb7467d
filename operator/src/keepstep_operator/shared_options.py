"""Options that several components share, and how commands fail. Each option names its variable: an
automatic prefix would meet the `<SERVICE>_PORT` variables that Kubernetes sets for Services named
`keepstep-...`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from keepstep.errors import KeepstepError, UsageError
from keepstep_operator.names import METRICS_PORT
from keepstep_operator.text_sanitizing import replace_unprintable

Command = TypeVar("Command", bound=Callable[..., Any])


class _Misuse(click.ClickException):
    exit_code = 2


class ErrorReportingGroup(click.Group):
    """Our own errors become one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeepstepError as error:
            kind = _Misuse if isinstance(error, UsageError) else click.ClickException
            raise kind(replace_unprintable(str(error), lines=True)) from error


def option(name: str, *more: str, **settings: Any) -> Callable[[Command], Command]:
    """A click option `--<name>` that also reads KEEPSTEP_<NAME>; its help says so."""
    variable = "KEEPSTEP_" + name.removeprefix("--").replace("-", "_").upper()
    settings.setdefault("envvar", variable)
    return click.option(name, *more, show_envvar=True, show_default=True, **settings)


namespace_option: Final = option(
    "--namespace", required=True, metavar="NAME", help="Namespace of the release."
)

host_path_option: Final = option(
    "--host-path",
    "host_paths",
    multiple=True,
    metavar="DIR",
    envvar="KEEPSTEP_HOST_PATHS",
    help="Prefix of node directories that policies may use; may be repeated (variable: separated"
    " by spaces).",
)

log_level_option: Final = option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="What is logged: that, and what is worse.",
)

metrics_port_option: Final = option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=METRICS_PORT,
    help="HTTP: /metrics, /healthz, /readyz. 0: any free port.",
)


def port_option(default: int) -> Callable[[Command], Command]:
    """`--port`: the HTTPS port."""
    return option(
        "--port", type=click.IntRange(0, 65535), default=default, help="HTTPS. 0: any free port."
    )
