"""Starting a browser with a page."""

from __future__ import annotations

import contextlib
import os
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path


def has_display() -> bool:
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
