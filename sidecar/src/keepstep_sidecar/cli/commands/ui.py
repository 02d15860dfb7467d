"""`keepstep ui`: shows the runs of this machine on a page in a browser."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.cli.options import directory_option


@click.command()
@directory_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1 to listen on.  [default: a free one]",
)
@click.option("--no-open", is_flag=True, help="Only print the URL; start no browser.")
def ui(directory: Path, port: int, no_open: bool) -> None:
    """Show the runs below DIR in a browser, as they change.

    Listens on 127.0.0.1 alone; the token in the URL lets in one browser, once. It reads, and
    changes nothing. Ctrl-C ends it. On another machine: ssh -L PORT:127.0.0.1:PORT, and --port PORT
    there.

    \b
    Examples:
      keepstep ui
      keepstep ui --dir /scratch/ckpt --port 8790 --no-open
    """
    asyncio.run(_serve(Path(os.path.abspath(directory)), port=port, browser=not no_open))


async def _serve(directory: Path, *, port: int, browser: bool) -> None:
    from keepstep_sidecar.cli import output, run_pages
    from keepstep_sidecar.ui.access import Access
    from keepstep_sidecar.ui.browser import show
    from keepstep_sidecar.ui.server import listen, serving

    access, listening = Access("keepstep ui"), listen(port)
    port = listening.getsockname()[1]
    async with serving(
        listening,
        access,
        place=str(directory),
        names=lambda: run_dir.runs_in(directory),
        read=run_pages.reader(directory),
        text=output.printable,
    ):
        await show(
            lambda: access.url(port),
            browser=browser,
            echo=lambda url: output.echo(f"runs in {directory}: {url}\n(Ctrl-C ends it)"),
        )
