"""The process that serves: claims its directories, listens, ends cleanly."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from aiohttp import web

from keepstep.errors import StorageError, UsageError
from keepstep.steps import Epoch, StepId
from keepstep_sidecar import journal, reporting
from keepstep_sidecar.config import Config
from keepstep_sidecar.depots import Depot
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.reporter import Look, Reporter
from keepstep_sidecar.server import application, public_application
from keepstep_sidecar.service import Service
from keepstep_sidecar.status import volume_status
from keepstep_sidecar.tasks import Tasks
from keepstep_sidecar.unwritable import UnwritableVolume
from keepstep_sidecar.volume import Volume
from keepstep_sidecar.volumes import VolumeSet

_SHUTDOWN_S = 3.0
_UMASK = 0o007
"""Trainers of the same group may connect and fill slots; nobody else may look."""


def serve(config: Config) -> None:
    """Serve until the end. Raises KeepstepError when it cannot begin."""
    journal.configure(config.run)
    os.umask(_UMASK)
    with _claimed(config):
        asyncio.run(_serve(config))


@contextmanager
def _claimed(config: Config) -> Iterator[None]:
    """Own the memory directory: one sidecar at a time. Raises UsageError naming the other one."""
    config.memory_dir.mkdir(mode=0o770, parents=True, exist_ok=True)
    path = config.memory_dir / "sidecar.pid"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UsageError(
                f"{config.memory_dir} belongs to a sidecar that is running (pid"
                f" {file.read().strip()}); stop it with `keepstep stop`"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        _describe(config)
        config.socket.unlink(missing_ok=True)
        try:
            yield
        finally:
            config.socket.unlink(missing_ok=True)
            _leave(config.memory_dir)


def _describe(config: Config) -> None:
    about = {"config": asdict(config), "pid": os.getpid(), "started_at": time.time()}
    (config.memory_dir / "sidecar.json").write_text(json.dumps(about, default=str, indent=1))


def _leave(memory_dir: Path) -> None:
    """Remove what is ours; the directory too when no slots are left in it."""
    if any(memory_dir.glob("rank-*")):
        (memory_dir / "sidecar.pid").unlink(missing_ok=True)
        return
    for name in ("sidecar.json", "sidecar.pid"):
        (memory_dir / name).unlink(missing_ok=True)
    if not any(memory_dir.iterdir()) and not os.path.ismount(memory_dir):
        memory_dir.rmdir()


def _open_volumes(config: Config) -> VolumeSet:
    """All of them, or StorageError: a run that silently lacks a volume may lack its steps, too.

    With an operator to tell it is not silent, and training does not wait for a better volume.
    """
    return VolumeSet(
        [_open_volume(directory, config) for directory in config.volumes],
        bytes_per_second=config.bytes_per_second,
    )


def _open_volume(directory: Path, config: Config) -> Volume:
    root = directory / config.run
    try:
        return Volume(
            root,
            run=config.run,
            io_threads=config.io_threads,
            capacity_bytes=config.capacity_bytes,
            verify=config.verify,
        )
    except StorageError as error:
        if config.reporting is None:
            raise
        warn("volume not writable", path=str(root), reason=str(error))
        return UnwritableVolume(root, run=config.run, reason=str(error), verify=config.verify)


async def _serve(config: Config) -> None:
    volumes = _open_volumes(config)
    async with Tasks() as tasks:
        depots = _depots(
            config,
            volumes,
            epochs=lambda: service.catalog.epochs(),
            pinned=lambda: service.catalog.pinned(),
        )
        service = Service(config, volumes, tasks, depots)
        service.reporter = _reporter(service)
        try:
            service.start()
            await _listen(service, tasks)
        finally:
            await service.beyond.close()
            await asyncio.to_thread(service.close)


def _depots(
    config: Config,
    volumes: VolumeSet,
    *,
    epochs: Callable[[], tuple[Epoch, ...]],
    pinned: Callable[[], frozenset[StepId] | None],
) -> list[Depot]:
    """What is configured beyond this machine; nothing of it is even imported without."""
    depots: list[Depot] = []
    if config.archive is not None:
        from keepstep_sidecar.archive import opening

        depots += opening.depots(config, epochs=epochs, pinned=pinned)
    if config.peers is not None:
        from keepstep_sidecar.peer import opening as peers

        depots.append(
            peers.depot(config.peers, volumes, run=config.run, reporting=config.reporting)
        )
    return depots


def _reporter(service: Service) -> Reporter | None:
    """Who tells the operator, where there is one that can be trusted."""
    if (config := service.config.reporting) is None:
        return None
    look = Look(
        measure=lambda: volume_status(service),
        report=lambda volumes, sequence: reporting.report(service, volumes, sequence=sequence),
        news=reporting.news,
        urgent=lambda: reporting.urgent(service),
    )
    try:
        return Reporter(config, look, obey=service.obey, changes=service.changes)
    except UsageError as error:  # training does not wait for a better certificate
        warn("no reports", reason=str(error))
        return None


async def _listen(service: Service, tasks: Tasks) -> None:
    """Serve the socket (and metrics over TCP) until the service ends."""
    runner = _runner(application(service, tasks))
    public = _runner(public_application(service))
    await runner.setup()
    await public.setup()
    await _listen_publicly(public, service.config.metrics_port)
    await web.UnixSite(runner, str(service.config.socket)).start()
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


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )


async def _listen_publicly(runner: web.AppRunner, port: int | None) -> None:
    """Metrics are worth no failure: a port that is taken is said, and training goes on."""
    if port is None:
        return
    try:
        await web.TCPSite(runner, port=port).start()
    except OSError as error:
        warn("no metrics", port=port, reason=str(error))
