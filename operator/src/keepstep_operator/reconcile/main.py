"""`keepstep-operator reconcile`: the process."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
import kopf

from keepstep_operator import log
from keepstep_operator.kube.access import find_access
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.log import info
from keepstep_operator.names import REPORTS_PORT
from keepstep_operator.reconcile import handlers
from keepstep_operator.reconcile.metrics import ReconcileMetrics
from keepstep_operator.reconcile.peer_certificates import PeerCertificates
from keepstep_operator.reconcile.periodic_checks import PeriodicChecks
from keepstep_operator.reconcile.reports_api import ReportsApi
from keepstep_operator.reconcile.run_registry import RunRegistry
from keepstep_operator.reconcile.writers import ObjectWriter
from keepstep_operator.serving import metrics_application, serve_application, until_signal
from keepstep_operator.shared_options import (
    host_path_option,
    log_level_option,
    metrics_port_option,
    namespace_option,
    option,
    port_option,
)
from keepstep_operator.tls_reload import ServerTls


@dataclass(frozen=True, kw_only=True)
class ReconcileSettings:
    """The command's options."""

    host_paths: tuple[str, ...]
    watch_nodes: bool
    peer_ca_dir: Path
    reports_service: str
    port: int
    metrics_port: int
    namespace: str


@click.command()
@host_path_option
@option(
    "--watch-nodes",
    is_flag=True,
    help="Follow the cluster's nodes: warn of one that is drained while it holds the only copy of"
    " something, and know the zones of peers.",
)
@option(
    "--peer-ca-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default="/peer-ca",
    help="Directory with the authority that signs for sidecars and for this server: tls.crt,"
    " tls.key, and ca.crt (all that are trusted); they may change.",
)
@option(
    "--reports-service",
    metavar="NAME",
    default="keepstep-reports",
    help="Service by which sidecars call this server.",
)
@port_option(REPORTS_PORT)
@log_level_option
@metrics_port_option
@namespace_option
def reconcile(**options: Any) -> None:
    """Watch runs, take their reports, show what is protected.

    Run one of it. While it is away, training, saving, commits and restarts go on; what it knows it
    learns again from pods, reports and CheckpointRuns.

    \b
    Examples:
      keepstep-operator reconcile --namespace keepstep-system --peer-ca-dir /peer-ca
      keepstep-operator reconcile --namespace keepstep-system --host-path /mnt/nvme0
    """
    log.configure("reconcile", level=options.pop("log_level"))
    logging.getLogger("kopf").setLevel(logging.WARNING)
    asyncio.run(serve(ReconcileSettings(**options)))


class Parts:
    """All parts of the process but its listeners, connected. `ending`: set to end `work`."""

    def __init__(
        self, client: KubeClient, settings: ReconcileSettings, signing: PeerCertificates
    ) -> None:
        self._settings = settings
        self.ending = asyncio.Event()
        self.registry = RunRegistry(clock=time.time)
        self.metrics = ReconcileMetrics(self.registry.runs)
        self.writer = ObjectWriter(self.registry, client, metrics=self.metrics)
        self.registry.mark, self.registry.emit = self.writer.mark_run_changed, self.writer.emit
        self.rounds = PeriodicChecks(
            self.registry, client, namespace=settings.namespace, agents=bool(settings.host_paths)
        )
        self.reports = ReportsApi(
            self.registry,
            client,
            metrics=self.metrics,
            ready=self.why_not_ready,
            signing=signing,
            namespace=settings.namespace,
        )

    def why_not_ready(self) -> str:
        """Why no report can be taken in yet; '' if reports can."""
        return "" if self.registry.cluster.complete else "the API server has not listed all runs"

    async def work_until_ending(self) -> None:
        """Work until `ending`, or until kopf ends: it takes SIGTERM and SIGINT."""
        ending = asyncio.create_task(self.ending.wait())
        loading = asyncio.create_task(self.rounds.load_runs_and_pods())
        await _first(loading, ending)
        if self.ending.is_set():
            loading.cancel()
            return
        background = (
            self.rounds.run_check_loop(),
            self.rounds.run_lateness_loop(),
            self.writer.run(),
            self.writer.write_events(),
            self.writer.write_checkpoints(),
        )
        tasks = [asyncio.create_task(coroutine) for coroutine in background]
        try:
            await _first(asyncio.create_task(self._follow()), *tasks)
        finally:
            for task in (ending, *tasks):
                task.cancel()

    async def _follow(self) -> None:
        await kopf.operator(
            registry=handlers.handler_registry(watch_nodes=self._settings.watch_nodes),
            settings=handlers.kopf_settings(),
            memo=kopf.Memo(
                registry=self.registry, writer=self.writer, host_paths=self._settings.host_paths
            ),
            clusterwide=True,
            standalone=True,
            identity=cast(Any, "keepstep"),  # otherwise the user's name, which no image has
            stop_flag=self.ending,
        )


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one of these is done. Raises its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def serve(settings: ReconcileSettings) -> None:
    """Run until SIGTERM."""
    signing = PeerCertificates(settings.peer_ca_dir)
    name = f"{settings.reports_service}.{settings.namespace}.svc"
    tls = ServerTls(signing.issue_reports_api_certificate(name, f"{name}.cluster.local"))
    async with KubeClient(await find_access()) as client:
        parts = Parts(client, settings, signing)
        reloading = asyncio.create_task(tls.keep_fresh())
        ended = asyncio.create_task(until_signal())  # kopf takes signals over once it runs
        ended.add_done_callback(lambda task: parts.ending.set())
        async with (
            serve_application(
                metrics_application(parts.metrics.registry, parts.why_not_ready),
                port=settings.metrics_port,
            ) as metrics_port,
            serve_application(
                parts.reports.application(), port=settings.port, ssl_context=tls.context
            ) as port,
        ):
            info("reconcile.started", port=port, metrics_port=metrics_port)
            await parts.work_until_ending()
        reloading.cancel()
        ended.cancel()
    info("reconcile.stopped")
