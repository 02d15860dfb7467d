"""Serves the page of this machine's runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from keepstep_page.access import Access, sign
from keepstep_page.board import Board
from keepstep_page.server import Site, application, on_loopback
from keepstep_sidecar.ui.pages import MachinePages
from keepstep_sidecar.ui.view import RunPage

_READERS: Final = 8


@asynccontextmanager
async def serving(
    *,
    directory: Path,
    port: int,
    names: Callable[[], Sequence[str]],
    read: Callable[[str], RunPage],
    text: Callable[[str], str] = str,
) -> AsyncIterator[str]:
    """Serve the page on this machine; yields its URL. `port` 0: any free port. `names`, `read`: see
    `Board`, but both may block. `text`: see `Pages`. Raises UsageError when the port cannot be
    used."""
    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="keepstep-ui-read")
    board = board_of(names, read, readers)
    site = Site(board, MachinePages(place=str(directory), text=text))
    access = Access("keepstep ui")
    app = application(lambda _: site, middleware=access.middleware(), sign=sign)
    try:
        async with on_loopback(app, port) as bound:
            yield access.url(bound)
    finally:
        readers.shutdown(wait=False, cancel_futures=True)


def board_of(
    names: Callable[[], Sequence[str]],
    read: Callable[[str], RunPage],
    readers: ThreadPoolExecutor,
) -> Board[RunPage]:
    """Runs that are read on threads. The runs are listed on other threads, so that a read that
    hangs does not stop this."""
    loop = asyncio.get_running_loop()

    async def listed() -> Sequence[str]:
        return await loop.run_in_executor(None, names)

    async def seen(name: str) -> RunPage:
        return await loop.run_in_executor(readers, read, name)

    return Board(listed, seen, lambda name, error: RunPage(name=name, error=error))
