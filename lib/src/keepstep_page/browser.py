"""Shows a page to the user who asked for it on a command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path


async def show(
    serving: AbstractAsyncContextManager[str],
    what: str,
    *,
    browser: bool,
    echo: Callable[..., None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    `serving` yields the URL. `what`: what is at the URL. `browser`: open a browser if there is a
    display. `echo`: like `click.echo`.
    """
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving as url:
        echo(f"{what}: {url}")
        with opened(url) if browser and _has_display() else contextlib.nullcontext():
            echo("Ctrl-C ends it", err=True)
            await ended.wait()


def _has_display() -> bool:
    """Whether there is a display. Without one, the browser that opens would be a text browser, in
    the terminal that shows the URL.
    """
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


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
