"""Starts the page of this run when somebody connects to its port, and only then.

The page is a process of its own (`keepstep-sidecar page`), so that neither its work nor its faults
are the sidecar's. It inherits the listening socket and ends by itself when it is not used. Until
the next connection, the page costs a socket that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import sys
from typing import Final

from keepstep_sidecar.concurrency import Tasks
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.log import warn

HOST: Final = "127.0.0.1"
_PAUSE_S: Final = 1.0
"""Between two pages: one that cannot start must not keep a core busy."""


def offer_page(config: Config, tasks: Tasks) -> None:
    """Listen on `config.ui_port` of the loopback, and serve the page there. A port that is taken is
    only logged: training must not fail over a page."""
    if config.ui_port is None:
        return
    try:
        listening = socket.create_server((HOST, config.ui_port))
    except OSError as error:
        warn("no page", port=config.ui_port, reason=str(error))
        return
    tasks.keep(functools.partial(_serve, listening, config), "serve page")


async def _serve(listening: socket.socket, config: Config) -> None:
    while True:
        await _connected(listening)
        await _show(listening.fileno(), config)
        await asyncio.sleep(_PAUSE_S)


async def _connected(listening: socket.socket) -> None:
    """Wait until a connection can be accepted, and leave it to the page."""
    loop, connected = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listening, connected.set)
    try:
        await connected.wait()
    finally:
        loop.remove_reader(listening)


async def _show(fd: int, config: Config) -> None:
    """Run the page on the listening socket `fd` until it ends."""
    words = ("page", "--run", config.run, "--memory-dir", str(config.memory_dir), "--fd", str(fd))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "keepstep_sidecar", *words,
        stdin=asyncio.subprocess.DEVNULL, pass_fds=(fd,),
    )  # fmt: skip
    try:
        if code := await process.wait():
            warn("page failed", code=code)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
