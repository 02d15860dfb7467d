"""`keepstep-operator ui`: the process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import click

from keepstep_operator import journal, names
from keepstep_operator.journal import say
from keepstep_operator.kube import Client, find_access
from keepstep_operator.serving import listening, metrics_registry, observed, until_signal
from keepstep_operator.settings import log_level_option, metrics_port_option, option
from keepstep_operator.ui.server import page
from keepstep_operator.ui.viewers import Viewers
from keepstep_page.server import on_loopback


@click.command(short_help="Show runs in a browser to those who may read them.")
@option(
    "--port",
    type=click.IntRange(0, 65535),
    default=names.UI_PORT,
    help="HTTP, on 127.0.0.1 alone: kubectl port-forward leads there. 0: any free port.",
)
@log_level_option
@metrics_port_option
def ui(port: int, log_level: str, metrics_port: int) -> None:
    """Show runs in a browser to those who may read them: `kubectl keepstep ui` leads there.

    Who asks brings a token; TokenReview says whose it is, SubjectAccessReview whether they may list
    CheckpointRuns and Checkpoints of the namespace.

    \b
    Examples:
      keepstep-operator ui
      keepstep-operator ui --port 8790 --metrics-port 9090
    """
    journal.configure("ui", level=log_level)
    asyncio.run(serve(port=port, metrics_port=metrics_port))


async def serve(*, port: int, metrics_port: int) -> None:
    """Serve until SIGTERM. Raises UsageError if there is no API server or no free port."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(await find_access()))
        served = page(client, Viewers(client))
        bound = await stack.enter_async_context(on_loopback(served, port))
        observing = observed(metrics_registry(), lambda: "")
        metrics = await stack.enter_async_context(listening(observing, port=metrics_port))
        say("listening", port=bound, metrics_port=metrics)
        await until_signal()
    say("ended")
