"""The process that serves: claims its directories, listens, ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from aiohttp import web

from keepstep.errors import ImageError, KeepstepError, StorageError, UsageError
from keepstep.steps import Epoch, StepId
from keepstep_sidecar import connections, log
from keepstep_sidecar.api.server import application, public_application
from keepstep_sidecar.api.service import Service
from keepstep_sidecar.api.status import volume_status
from keepstep_sidecar.concurrency import Tasks
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.memory.slot_file import make_way
from keepstep_sidecar.report import report
from keepstep_sidecar.report.reporter import Look, Reporter
from keepstep_sidecar.tiers.tier import Depot
from keepstep_sidecar.volume.volume import Ownership, Volume
from keepstep_sidecar.volume.volume_set import VolumeSet

_SHUTDOWN_S = 3.0
_WATCH_S = 1.0
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_SCRAPES, _SCRAPE_S = 16, 10.0
"""Connections to the metrics port, and how long each may last: anybody can open them."""
_UMASK = 0o007
"""Trainers of the same group may connect and fill slots; nobody else may look."""


def serve(config: Config) -> None:
    """Serve until the end. Raises KeepstepError when it cannot begin."""
    log.configure(config.run)
    os.umask(_UMASK)
    connections.raise_descriptor_limit()
    claim = Claim(config)
    claim.take()
    try:
        asyncio.run(_serve(config, claim))
    finally:
        claim.leave()


class Claim:
    """This process's right to the memory directory: one sidecar at a time.

    Trainers can write there, too. So a name may be a link to a file of ours: nothing is followed,
    and files are replaced, never rewritten.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = config.memory_dir
        self._lock: Ownership | None = None
        self._above: int | None = None

    def take(self) -> None:
        """Own the directory, made anew if need be, and the name of the socket. Raises UsageError
        naming another sidecar, or a directory that is not ours to use."""
        try:
            self._directory.mkdir(mode=0o770, parents=True, exist_ok=True)
            self._check_owner()
            self._own(self._directory / "sidecar.pid")
            self._describe(self._directory / "sidecar.json")
            make_way(self._config.socket)
        except OSError as error:
            text = f"cannot use the memory directory {self._directory}: {error}"
            raise UsageError(text) from error

    def _check_owner(self) -> None:
        """Where everybody may write, another user could have made what was removed."""
        above = self._directory.parent.stat().st_uid
        if self._above not in (None, above) and above != os.geteuid():
            raise PermissionError(errno.EPERM, f"{self._directory.parent} is another user's now")
        self._above = above

    @property
    def held(self) -> bool:
        """Whether nobody else could come."""
        return self._lock is not None and self._lock.held

    def _own(self, path: Path) -> None:
        if self.held:
            return
        make_way(path, keep_own=True)
        try:
            taken = Ownership(path)
        except StorageError as error:
            raise UsageError(f"the memory directory {error}") from error
        if self._lock is not None:
            self._lock.release()
        self._lock = taken

    def _describe(self, path: Path) -> None:
        about = {"config": asdict(self._config), "pid": os.getpid(), "started_at": time.time()}
        unfinished = path.with_name(f".{path.name}.new")
        make_way(unfinished)
        with os.fdopen(os.open(unfinished, _CREATE, 0o660), "w") as file:
            json.dump(about, file, default=str, indent=1)
        make_way(path, keep_own=True)
        unfinished.replace(path)

    def leave(self) -> None:
        """Remove what is ours; the directory too when no slots are left in it."""
        left = any(self._directory.glob("rank-*"))
        for name in ("sidecar.sock", "sidecar.pid", *(() if left else ("sidecar.json",))):
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()
        if self._lock is not None:
            self._lock.release()
        if not left and not os.path.ismount(self._directory):
            with contextlib.suppress(OSError):  # others have something there
                self._directory.rmdir()


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
    except (StorageError, ImageError) as error:  # also a record that is damaged, or another run's
        if config.reporting is None:
            raise
        warn("volume not writable", path=str(root), reason=str(error))
        return Volume(root, run=config.run, verify=config.verify, read_only=str(error))


async def _serve(config: Config, claim: Claim) -> None:
    volumes = _open_volumes(config)
    async with Tasks() as tasks:
        depots = _depots(
            config,
            volumes,
            epochs=lambda: service.committer.epochs(),
            pinned=lambda: service.committer.pinned(),
        )
        service = Service(config, volumes, tasks, depots)
        service.reporter = _reporter(service)
        try:
            service.start()
            await _listen(service, tasks, claim)
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
        from keepstep_sidecar.tiers.archive import tier

        depots += tier.depots(config, epochs=epochs, pinned=pinned)
    if config.peers is not None:
        from keepstep_sidecar.tiers.peer import tier as peers

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
        report=lambda volumes, sequence: report.report(service, volumes, sequence=sequence),
        news=report.news,
        urgent=lambda: report.urgent(service),
    )
    try:
        return Reporter(config, look, obey=service.obey, changes=service.changes)
    except UsageError as error:  # training does not wait for a better certificate
        warn("no reports", reason=str(error))
        return None


class _Door:
    """The trainers' socket: what listens, and under which name."""

    def __init__(self, runner: web.AppRunner, path: Path) -> None:
        self._runner = runner
        self._path = path
        self._site: web.UnixSite | None = None
        self._made: os.stat_result | None = None

    async def open(self) -> None:
        """Listen, under a new name; connections stay as they are. Raises OSError."""
        if self._site is not None:
            await self._site.stop()
        make_way(self._path)
        self._site = web.UnixSite(self._runner, str(self._path))
        await self._site.start()
        with contextlib.suppress(FileNotFoundError):  # removed at once: it will be made again
            self._made = self._path.lstat()

    @property
    def there(self) -> bool:
        """Whether the name still leads here. Raises OSError when that cannot be told."""
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return False
        return self._made is not None and os.path.samestat(self._made, found)


async def _watch(service: Service, claim: Claim, door: _Door) -> None:
    """Make again what somebody else removed: the memory directory, the socket, slots."""
    trouble = ""
    while not service.ending:
        await asyncio.sleep(_WATCH_S)
        try:
            if not (service.ending or (claim.held and door.there)):
                warn("socket removed by somebody else", path=str(service.config.socket))
                claim.take()
                await door.open()
                say("listening again")
            await service.mend_memory()
            trouble = ""
        except (KeepstepError, OSError) as error:
            if str(error) != trouble:
                warn("memory not made again", reason=str(error))
            trouble = str(error)


async def _listen(service: Service, tasks: Tasks, claim: Claim) -> None:
    """Serve the socket (and metrics over TCP) until the service ends."""
    runner = _runner(application(service, tasks))
    public = _runner(public_application(service))
    await runner.setup()
    await public.setup()
    await _listen_publicly(public, service.config.metrics_port, tasks)
    door = _Door(runner, service.config.socket)
    await door.open()
    tasks.keep(functools.partial(_watch, service, claim, door), "watch memory")
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


async def _listen_publicly(runner: web.AppRunner, port: int | None, tasks: Tasks) -> None:
    """Metrics are worth no failure: a port that is taken is said, and training goes on."""
    if port is None:
        return
    try:
        listening = connections.listen(port)
    except OSError as error:
        warn("no metrics", port=port, reason=str(error))
        return
    strangers: connections.Strangers[asyncio.Transport] = connections.Strangers(
        lambda transport: transport.abort(),
        most=_MOST_SCRAPES,
        most_each=_MOST_SCRAPES // 2,
        seconds=_SCRAPE_S,
    )
    assert runner.server is not None
    tasks.spawn(connections.serve(runner.server, listening, strangers), "serve metrics")
