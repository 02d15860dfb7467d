"""`keepstep-sidecar`: the process. Claims its directories, serves its socket, ends cleanly."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
from aiohttp import web

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar import journal
from keepstep_sidecar.cli.quantities import parse_duration, parse_size
from keepstep_sidecar.config import Config
from keepstep_sidecar.journal import say
from keepstep_sidecar.server import application
from keepstep_sidecar.service import Service
from keepstep_sidecar.tasks import Tasks
from keepstep_sidecar.volume import Volume
from keepstep_sidecar.volumes import VolumeSet

_SHUTDOWN_S = 3.0


class _Quantity(click.ParamType[object]):
    """`32Gi`, or `15m`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parse_size(value) if self.name == "size" else parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(context_settings={"show_default": True})
@click.option("--run", required=True, help="Name of the run.")
@click.option(
    "--memory-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory in shared memory, for slots and the socket.",
)
@click.option(
    "--volume",
    "volumes",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Directory that holds runs; may be repeated.",
)
@click.option("--slots", default=4, help="Images of each rank in memory.")
@click.option(
    "--memory-limit",
    "memory_limit_bytes",
    type=_Quantity("size"),
    help="For the slots of all ranks, like 32Gi.",
)
@click.option("--stage-every", default=1, help="Steps between two that are staged.")
@click.option("--persist-every", default=1, help="Steps between two that are made durable.")
@click.option("--keep", default=2, help="Committed steps that stay on the volumes.")
@click.option(
    "--capacity", "capacity_bytes", type=_Quantity("size"), help="Limit of each volume, like 400Gi."
)
@click.option("--io-threads", default=4, help="Threads for each volume.")
@click.option(
    "--linger",
    "linger_s",
    type=_Quantity("duration"),
    help="End when no trainer was there for so long, like 15m.",
)
def main(**options: object) -> None:
    """Keep one run's steps on this machine: slots in shared memory, shards on volumes."""
    try:
        config = Config(**options)  # type: ignore[arg-type]
        journal.configure(config.run)
        os.umask(0o007)  # trainers of the same group may fill slots; nobody else may look
        with _claimed(config):
            asyncio.run(_serve(config))
    except KeepstepError as error:
        click.echo(f"keepstep-sidecar: {error}", err=True)
        sys.exit(1)


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
    if not any(memory_dir.iterdir()):
        memory_dir.rmdir()


def _open_volumes(config: Config) -> VolumeSet:
    """All of them, or StorageError: a run that silently lacks a volume may lack its steps, too."""
    return VolumeSet([_open_volume(directory, config) for directory in config.volumes])


def _open_volume(directory: Path, config: Config) -> Volume:
    return Volume(
        directory / config.run,
        run=config.run,
        io_threads=config.io_threads,
        capacity_bytes=config.capacity_bytes,
    )


async def _serve(config: Config) -> None:
    volumes = _open_volumes(config)
    async with Tasks() as tasks:
        service = Service(config, volumes, tasks)
        try:
            service.start()
            await _listen(service, tasks)
        finally:
            await asyncio.to_thread(service.close)


async def _listen(service: Service, tasks: Tasks) -> None:
    """Serve the socket until the service ends."""
    runner = web.AppRunner(
        application(service, tasks),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    await web.UnixSite(runner, str(service.config.socket)).start()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: tasks.spawn(service.terminate(), "terminate"))
    say("listening", socket=str(service.config.socket), pid=os.getpid())
    try:
        await service.ended()
    finally:
        await runner.cleanup()
        say("ended")


if __name__ == "__main__":
    main()
