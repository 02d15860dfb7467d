"""`kubectl-keepstep`, which kubectl runs as `kubectl keepstep`. It only parses, asks and prints."""

from __future__ import annotations

import asyncio

import click

from keepstep_operator import __version__
from keepstep_operator.kubectl.cluster import Cluster
from keepstep_operator.kubectl.page import ForwardedPage, serve
from keepstep_operator.shared_options import ErrorReportingGroup
from keepstep_operator.text_sanitizing import replace_unprintable


@click.group(cls=ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kubectl keepstep")
def cli() -> None:
    """The page of a run of keepstep in this cluster. All else is in kubectl's own commands: get and
    describe ckrun, get ckpt, logs."""


def print_sanitized(text: str) -> None:
    """Print lines. Every output of the plugin goes through here, since it may be text of a pod, and
    could be meant for the terminal."""
    click.echo(replace_unprintable(text, lines=True))


@cli.command(epilog="\b\nExamples:\n  kubectl keepstep ui gpt-1a2b -n ml --port 8790")
@click.argument("run")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1 to listen on; a free one.",
)
@click.option("-n", "--namespace", help="Namespace; the context's.")
@click.option("--context", help="Context of the kubeconfig; the current one.")
def ui(run: str, port: int, namespace: str | None, context: str | None) -> None:
    """Print the URL of a page of RUN, as the sidecar of its node rank 0 sees it.

    Forwards a port to that pod, by your own right (get and create of pods/portforward). The token
    in the URL lets in one browser, once. Ctrl-C ends it.
    """
    cluster = Cluster(context=context, namespace=namespace)
    pods = cluster.find_leader_pods(run)
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    if not running:
        cluster.require_run(run)  # that there is no such run is said first
        raise click.ClickException(f"no pod of node rank 0 of run {run} is running now")
    asyncio.run(
        serve(ForwardedPage(cluster, running[-1]), port=port, run=run, report=print_sanitized)
    )
