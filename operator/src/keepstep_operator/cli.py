"""The group `keepstep-operator`. A component is imported only when it is called, so that admission
does not load `cryptography`."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

import click

from keepstep_operator import __version__
from keepstep_operator.shared_options import ErrorReportingGroup

_COMMANDS: Final = {
    "admission": (
        "keepstep_operator.admission.main:admission",
        "Serve the webhook that puts the sidecar into annotated pods.",
    ),
    "reconcile": (
        "keepstep_operator.reconcile.main:reconcile",
        "Watch runs, take their sidecars' reports, tell what is protected.",
    ),
    "certificates": (
        "keepstep_operator.certificates.main:certificates",
        "Make and replace the certificate of the webhook, and the authority of sidecars.",
    ),
}


def _leave_out_synchronous_client() -> None:
    """Put the package `kubernetes` in place without running it: it would import its synchronous
    client, requests and oauthlib, 12 MiB of which nothing is used. kopf takes that client for not
    installed."""
    for name in ("kubernetes", "kubernetes.aio"):
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("kubernetes.client", None)  # type: ignore[arg-type]


class _Components(ErrorReportingGroup):
    """A group that knows its commands by name and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        _leave_out_synchronous_client()
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Components"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(
    cls=_Components,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="keepstep-operator")
def cli() -> None:
    """keepstep's operator for Kubernetes: one program, three processes.

    \b
    Examples:
      keepstep-operator admission --namespace keepstep-system --sidecar-image keepstep/sidecar:0.1.0
      keepstep-operator certificates --namespace keepstep-system
      keepstep-operator reconcile --help

    Every option can be given as a variable KEEPSTEP_<OPTION>; the chart does so. Outside a cluster
    KUBECONFIG says which one is meant.
    """


if __name__ == "__main__":
    cli()
