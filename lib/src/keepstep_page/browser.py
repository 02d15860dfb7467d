"""Showing a page to the one who asked for it on a command line."""

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
    """Serve until SIGINT or SIGTERM; `serving` yields the URL, `what` is there. `browser`: start
    one, where there is a display. `echo`: as `click.echo`."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving as url:
        echo(f"{what}: {url}")
        with opened(url) if browser and _has_display() else contextlib.nullcontext():
            echo("Ctrl-C ends it", err=True)
            await ended.wait()


def _has_display() -> bool:
    """Without one, what opens is a browser of text, in the terminal that has the URL."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextlib.contextmanager
def opened(url: str) -> Iterator[None]:
    """The page in a browser, led there by a file that is this user's alone: everybody sees the
    words of a browser's command line, and the URL lets one in."""
    with tempfile.NamedTemporaryFile("w", prefix="keepstep-ui-", suffix=".html") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield
