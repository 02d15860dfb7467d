"""`keepstep-operator reconcile`: the process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from keepstep_operator import journal
from keepstep_operator.api.model import RunKey
from keepstep_operator.journal import crash, say
from keepstep_operator.kube import Access, Client, Feed, find_access, follow
from keepstep_operator.names import REPORTS_PORT
from keepstep_operator.observing import observing
from keepstep_operator.reconcile.errands import Errands
from keepstep_operator.reconcile.gc_tuning import (
    collect_after_listing,
    collect_when_grown,
    give_back_freed,
    spare_what_stays,
)
from keepstep_operator.reconcile.leadership import FencedClient, Leadership
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.peer_certificates import PeerCertificates
from keepstep_operator.reconcile.ratelimit import Throttle
from keepstep_operator.reconcile.reports_api import ReportsApi
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.token_auth import TokenAuth
from keepstep_operator.reconcile.turns import SLICE_S
from keepstep_operator.reconcile.watch import Handlers, Uninjected
from keepstep_operator.reconcile.writers.checkpoint_writer import CheckpointWriter
from keepstep_operator.reconcile.writers.events import EventWriter
from keepstep_operator.reconcile.writers.status_writer import StatusWriter
from keepstep_operator.serving import listening, until_signal
from keepstep_operator.settings import (
    host_path_option,
    log_level_option,
    metrics_port_option,
    namespace_option,
    option,
    port_option,
    tls_dir_option,
)
from keepstep_operator.tls import ServerTls

_TICK_S: Final = 2.0
"""Whatever becomes true by waiting takes at least half a minute. A tick of a thousand runs takes 40
ms."""
_CRASH_LOGGED_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The command's options."""

    host_paths: tuple[str, ...]
    watch_nodes: bool
    tls_dir: Path
    peer_ca_dir: Path | None
    port: int
    metrics_port: int
    namespace: str
    lease: str
    pod_name: str


class Clock:
    """Unix seconds that never jump: the wall clock at the start, plus the monotonic time since."""

    def __init__(self) -> None:
        self._wall = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._wall + time.monotonic()


@click.command(short_help="Watch runs, take their sidecars' reports, tell what is protected.")
@host_path_option
@option(
    "--watch-nodes",
    is_flag=True,
    help="Follow the cluster's nodes: warn of one that is drained while it holds the only copy of"
    " something, and know the zones of peers.",
)
@tls_dir_option("/tls")
@option(
    "--peer-ca-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory with the authority that signs for sidecars: tls.crt, tls.key and what else is"
    " trusted.  [default: none is signed]",
)
@option(
    "--lease",
    default="",
    metavar="NAME",
    help="Lease of NAMESPACE: of several replicas the one that holds it works, the others stand by."
    "  [default: this is the only one]",
)
@option("--pod-name", default="", metavar="NAME", help="Of this replica, as holder of the Lease.")
@port_option(REPORTS_PORT)
@log_level_option
@metrics_port_option
@namespace_option
def reconcile(**options: Any) -> None:
    """Watch runs, take their sidecars' reports, tell what is protected.

    Run one of it, or several with a --lease. While none works training, saving and restarts go on;
    what it knows it learns again from pods and reports.

    \b
    Examples:
      keepstep-operator reconcile --namespace keepstep-system --tls-dir /tls
      keepstep-operator reconcile --namespace keepstep-system --host-path /mnt/nvme0
    """
    journal.configure("reconcile", level=options.pop("log_level"))
    spare_what_stays()
    asyncio.run(serve(Settings(**options)))


class Reconciler:
    """All parts of the process, connected. `group`: owns all tasks; an exception in one ends it.
    `authorities`: see `ReportsApi`."""

    def __init__(
        self,
        client: Client,
        *,
        group: asyncio.TaskGroup,
        watch_nodes: bool = False,
        host_paths: tuple[str, ...] = (),
        peer_ca_dir: Path | None = None,
        namespace: str = "",
        clock: Callable[[], float],
        authorities: Callable[[], str] = str,
    ) -> None:
        self.registry = Registry()
        self.metrics = Metrics(self.registry)
        self._client = client
        self._group = group
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._crashes = Throttle(burst=5, refill_s=_CRASH_LOGGED_S)
        self.writer = StatusWriter(self.registry, client, metrics=self.metrics, clock=clock)
        self.checkpoint_writer = CheckpointWriter(
            self.registry, client, metrics=self.metrics, clock=clock
        )
        self.event_writer = EventWriter(
            client, uid_of=self.registry.uid_of, metrics=self.metrics, clock=clock
        )
        self.errands = Errands(
            self.registry,
            client,
            writer=self.writer,
            checkpoint_writer=self.checkpoint_writer,
            event_writer=self.event_writer,
            metrics=self.metrics,
            group=group,
            clock=clock,
        )
        handlers = Handlers(
            self.registry,
            self.errands,
            writer=self.writer,
            metrics=self.metrics,
            host_paths=host_paths,
            clock=clock,
        )
        self.objects, self.pods = handlers.objects(), handlers.pods()
        if host_paths:  # known before a report is answered, which names them
            self.objects.append(handlers.agents(namespace))
        self.nodes = [handlers.nodes()] if watch_nodes else []
        self._uninjected = Uninjected(handlers, client)
        self.reports = ReportsApi(
            self.registry,
            client,
            tokens=TokenAuth(client, clock=clock),
            carry_out=self.errands.carry_out,
            metrics=self.metrics,
            ready=self.ready,
            clock=clock,
            signing=PeerCertificates(peer_ca_dir),
            shown=self.pods.shown,
            authorities=authorities,
        )

    def start(self) -> None:
        """Start all tasks."""
        feeds: list[Feed[Any]] = [*self.objects, self.pods, *self.nodes]
        self._spawn(follow(self._client, feeds), "follow")
        self._spawn(self._uninjected.run(), "look for pods without a sidecar")
        self._spawn(self.writer.run(), "write statuses")
        self._spawn(self.checkpoint_writer.run(), "write checkpoints")
        self._spawn(self.event_writer.run(), "write events")
        self._spawn(self._tick(), "tick")

    def stop(self) -> None:
        """Cancel all tasks. What is not written yet is known again after a restart."""
        for task in self._tasks:
            task.cancel()
        self.errands.stop()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(self._group.create_task(work, name=name))

    def ready(self) -> str:
        """Why no report can be taken in yet; '' if reports can."""
        missing = [feed.name for feed in self.objects if not feed.loaded.is_set()]
        return f"waiting for the API server to list {', '.join(missing)}" if missing else ""

    async def _tick(self) -> None:
        """Tick all runs, once all existing objects are seen."""
        for feed in (*self.objects, self.pods):
            await feed.loaded.wait()
        collect_after_listing()
        while True:
            await asyncio.sleep(_TICK_S)
            began = time.perf_counter()
            for key in list(self.registry.runs):
                self._tick_run(key)
                if time.perf_counter() - began >= SLICE_S / 4:  # reports have slices too
                    await asyncio.sleep(0)
                    began = time.perf_counter()

    def _tick_run(self, key: RunKey) -> None:
        """Tick one run. An error is logged and does not end the process."""
        try:
            self.errands.carry_out(self.registry.tick_run(key, at=self._clock()))
        except Exception:
            self.metrics.left_out("tick")
            if self._crashes.allows(key, "tick", period_s=_CRASH_LOGGED_S, at=self._clock()):
                crash("run not looked after", run=str(key))


async def serve(settings: Settings) -> None:
    """Run until SIGTERM, or until another replica leads."""
    tls, access = ServerTls(settings.tls_dir), await find_access()
    async with Client(access) as lease_client:
        role = _role(lease_client, settings)
        async with _writing(access, role) as client, asyncio.TaskGroup() as group:
            parts = Reconciler(
                client,
                group=group,
                watch_nodes=settings.watch_nodes,
                host_paths=settings.host_paths,
                peer_ca_dir=settings.peer_ca_dir,
                namespace=settings.namespace,
                clock=Clock(),
                authorities=lambda: tls.authorities,
            )
            reloading = group.create_task(tls.keep_fresh(), name="reload the certificate")
            collecting = group.create_task(collect_when_grown(), name="collect garbage")
            giving = group.create_task(give_back_freed(), name="give back freed memory")
            ended = group.create_task(until_signal(), name="wait for a signal")
            await _work(parts, settings, tls, role, ended=ended)
            parts.stop()
            reloading.cancel()
            collecting.cancel()
            giving.cancel()
            ended.cancel()
        if role is not None and role.leads:
            await role.release()
    say("ended")


def _role(client: Client, settings: Settings) -> Leadership | None:
    """The leadership that this replica shares; None if it is the only one."""
    if not settings.lease:
        return None
    return Leadership(
        client,
        name=settings.lease,
        namespace=settings.namespace,
        identity=settings.pod_name or socket.gethostname(),
    )


def _writing(access: Access, role: Leadership | None) -> Client:
    return Client(access) if role is None else FencedClient(access, may_write=role.may_write)


async def _work(
    parts: Reconciler,
    settings: Settings,
    tls: ServerTls,
    role: Leadership | None,
    *,
    ended: asyncio.Task[str],
) -> None:
    """Stand by, then lead. A replica that stands by counts as ready: it can take over within
    seconds."""

    def ready() -> str:
        return parts.ready() if role is None or role.leads else ""

    port = settings.metrics_port
    async with observing(parts.metrics.registry, ready, port=port) as metrics_port:
        if role is not None:
            say("standing by", lease=settings.lease, metrics_port=metrics_port)
            await _either(ended, role.acquire())
        if ended.done():
            return
        parts.start()
        reports = parts.reports.application()
        async with listening(
            reports, port=settings.port, ssl_context=tls.context, one_request=True
        ) as port:
            say("listening", port=port, metrics_port=metrics_port)
            await (ended if role is None else _either(ended, role.hold()))


async def _either(ended: asyncio.Task[str], work: Coroutine[Any, Any, None]) -> None:
    """Wait until the work is done, or until the process is to end."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((ended, task), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    else:
        task.cancel()
