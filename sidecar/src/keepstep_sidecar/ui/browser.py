"""Shows a page to the user who asked for it on a command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path


async def show(url: Callable[[], str], *, browser: bool, echo: Callable[[str], None]) -> None:
    """Wait until SIGINT or SIGTERM. `url`: a URL that lets in one browser. `echo`: prints one.
    `browser`: also open a browser, with a URL of its own, if there is a display."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    echo(url())
    # without a display it would be a text browser, in the terminal that shows the URL
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    with opened(url()) if browser and display else contextlib.nullcontext():
        await ended.wait()


@contextlib.contextmanager
def opened(url: str) -> Iterator[None]:
    """Open the page in a browser.

    The browser gets a file that only this user can read, and the file leads to the URL. The URL
    grants access, and every user can see the command line of a browser.
    """
    with tempfile.NamedTemporaryFile("w", prefix="keepstep-ui-", suffix=".html") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield
