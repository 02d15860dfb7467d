"""`keepstep ui`: shows the runs of this machine on a page in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from keepstep_sidecar.cli import output, run_dir
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
    from keepstep_sidecar.cli import run_page_data
    from keepstep_sidecar.ui.server import PageAccess, listen_on_loopback, serve_page

    access, listening = PageAccess("keepstep ui"), listen_on_loopback(port)
    port = listening.getsockname()[1]
    async with serve_page(
        listening,
        access,
        place=str(directory),
        names=lambda: run_dir.runs_in(directory),
        read=run_page_data.run_page_reader(directory),
        text=output.printable,
    ):
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        output.print_line(f"runs in {directory}: {access.url(port)}\n(Ctrl-C ends it)")
        # without a display it would be a text browser, in the terminal that shows the URL
        display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        with opened(access.url(port)) if browser and display else contextlib.nullcontext():
            await ended.wait()


@contextlib.contextmanager
def opened(url: str) -> Iterator[None]:
    """Open the page in a browser.

    The browser gets a file that only this user can read, and the file leads to the URL. The URL
    grants access, and every user can see the command line of a browser.
    """
    import webbrowser

    with tempfile.NamedTemporaryFile("w", prefix="keepstep-ui-", suffix=".html") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield
