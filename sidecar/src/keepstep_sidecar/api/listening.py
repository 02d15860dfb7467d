"""Where the sidecar listens: on the trainers' socket, and on TCP ports for metrics and the page."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from keepstep.errors import KeepstepError
from keepstep_sidecar import connections
from keepstep_sidecar.api.server import application, public_application
from keepstep_sidecar.api.service import Service
from keepstep_sidecar.concurrency import Tasks
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.memory.directory_lock import DirectoryLock
from keepstep_sidecar.memory.slot_file import make_way

_SHUTDOWN_S = 3.0
_WATCH_S = 1.0
_LISTEN_AGAIN_S = 5.0
_PAUSE_S = 1.0
"""Between two pages: a page that cannot start must not keep a core busy."""
_MOST_SCRAPES, _SCRAPE_S = 16, 10.0
"""Connections to the metrics port, and how long each may last: anyone can open them."""


class _Door:
    """The trainers' socket: the server that listens, and its path."""

    def __init__(self, runner: web.AppRunner, path: Path) -> None:
        self._runner = runner
        self._path = path
        self._site: web.UnixSite | None = None
        self._made: os.stat_result | None = None

    async def open(self) -> None:
        """Listen under a new socket file. Open connections stay as they are. Raises OSError."""
        if self._site is not None:
            await self._site.stop()
        make_way(self._path)
        self._site = web.UnixSite(self._runner, str(self._path))
        await self._site.start()
        with contextlib.suppress(FileNotFoundError):  # removed at once: it will be made again
            self._made = self._path.lstat()

    @property
    def there(self) -> bool:
        """Whether the path still leads to this socket. Raises OSError when that is unknown."""
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return False
        return self._made is not None and os.path.samestat(self._made, found)


async def _watch(service: Service, lock: DirectoryLock, door: _Door) -> None:
    """Make again what other processes removed: the memory directory, the socket, slots."""
    trouble = ""
    while not service.ending:
        await asyncio.sleep(_WATCH_S)
        try:
            if not (service.ending or (lock.held and door.there)):
                warn("socket removed by somebody else", path=str(service.config.socket))
                lock.take()
                await door.open()
                say("listening again")
            await service.mend_memory()
            trouble = ""
        except (KeepstepError, OSError) as error:
            if str(error) != trouble:
                warn("memory not made again", reason=str(error))
            trouble = str(error)


async def listen(service: Service, tasks: Tasks, lock: DirectoryLock) -> None:
    """Serve the socket (and metrics over TCP) until the service ends."""
    runner, public = (
        web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        for app in (application(service, tasks), public_application(service))
    )
    await runner.setup()
    await public.setup()
    if (port := service.config.metrics_port) is not None:
        listening = _listening(port, service)
        tasks.spawn(_serve_metrics(public, listening, port, service), "serve metrics")
    _offer_page(service.config, tasks)
    door = _Door(runner, service.config.socket)
    await door.open()
    tasks.keep(functools.partial(_watch, service, lock, door), "watch memory")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: tasks.spawn(service.terminate(), "terminate"))
    say("listening", socket=str(service.config.socket), pid=os.getpid())
    try:
        await service.ended()
    finally:
        await runner.cleanup()
        await public.cleanup()
        say("ended")


async def _serve_metrics(
    runner: web.AppRunner, listening: socket.socket | None, port: int, service: Service
) -> None:
    """Serve metrics until cancelled. A port that is taken, maybe by the training script, is tried
    again: nothing else waits for it."""
    while listening is None:
        await asyncio.sleep(_LISTEN_AGAIN_S)
        listening = _listening(port, service)
    strangers: connections.Strangers[asyncio.Transport] = connections.Strangers(
        lambda transport: transport.abort(),
        most=_MOST_SCRAPES,
        most_each=_MOST_SCRAPES // 2,
        seconds=_SCRAPE_S,
    )
    assert runner.server is not None
    await connections.serve(runner.server, listening, strangers)


def _listening(port: int, service: Service) -> socket.socket | None:
    """A socket that listens on the port; None if it cannot be had, which the warnings say."""
    try:
        listening = connections.listen(port)
    except OSError as error:
        if not service.no_metrics:
            warn("no metrics", port=port, reason=str(error))
        reason = os.strerror(error.errno or 0)
        service.no_metrics = (
            f"no metrics are served, since port {port} cannot be had ({reason}); it is tried again."
            " If the training script uses that port, choose another one (sidecar.ports.metrics of"
            " the policy, --metrics-port)"
        )
        return None
    if service.no_metrics:
        say("metrics are served", port=port)
    service.no_metrics = ""
    return listening


def _offer_page(config: Config, tasks: Tasks) -> None:
    """Listen on `config.ui_port` of the loopback, and start the page when somebody connects.

    The page is a process of its own (`keepstep-sidecar page`), so that neither its work nor its
    faults are the sidecar's. It inherits the listening socket and ends by itself when it is not
    used. A port that is taken is only logged: training must not fail over a page.
    """
    if config.ui_port is None:
        return
    try:
        listening = socket.create_server(("127.0.0.1", config.ui_port))
    except OSError as error:
        warn("no page", port=config.ui_port, reason=str(error))
        return
    tasks.keep(functools.partial(_serve_page, listening, config), "serve page")


async def _serve_page(listening: socket.socket, config: Config) -> None:
    loop, connected = asyncio.get_running_loop(), asyncio.Event()
    while True:
        connected.clear()
        loop.add_reader(listening, connected.set)
        try:
            await connected.wait()  # the page accepts the connection
        finally:
            loop.remove_reader(listening)
        await _show(listening.fileno(), config)
        await asyncio.sleep(_PAUSE_S)


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
