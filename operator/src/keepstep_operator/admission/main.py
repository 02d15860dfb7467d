"""`keepstep-operator admission`: the process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from keepstep_operator import __version__, log
from keepstep_operator.admission.checkpoint_run_reader import ExistingRunReader
from keepstep_operator.admission.metrics import AdmissionMetrics
from keepstep_operator.admission.namespace_limits import NamespaceLimitsReader
from keepstep_operator.admission.policy_lookup import Policies
from keepstep_operator.admission.server import TIMEOUT_S, Admission, deadline_of
from keepstep_operator.injection import InjectionDefaults
from keepstep_operator.kube.access import find_access
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.log import info
from keepstep_operator.names import ADMISSION_PORT
from keepstep_operator.serving import metrics_application, serve_application, until_signal
from keepstep_operator.shared_options import (
    host_path_option,
    log_level_option,
    metrics_port_option,
    namespace_option,
    option,
    port_option,
)
from keepstep_operator.tls_reload import ServerTls, read_mounted_pair

_DRAIN_S: Final = 5.0
_READ_S: Final = 1.5
"""How long an answer of the API server is waited for, before it is asked once more."""


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """The command's options. `drain_s`: from SIGTERM until no new connection is accepted."""

    sidecar_image: str
    sidecar_pull_policy: str
    reports_url: str
    reports_ca: Path
    host_paths: tuple[str, ...]
    tls_dir: Path
    port: int
    metrics_port: int
    namespace: str
    timeout_s: float
    drain_s: float

    def path(self) -> str:
        """Where reviews are taken now; '' while that is unknown."""
        return _text(self.tls_dir / "path")

    def injection_defaults(self) -> InjectionDefaults | None:
        """The settings for each pod; None while the reports CA is unknown."""
        if not (reports_ca := _text(self.reports_ca)):
            return None
        return InjectionDefaults(
            sidecar_image=self.sidecar_image,
            sidecar_pull_policy=self.sidecar_pull_policy,
            reports_url=self.reports_url,
            reports_ca=reports_ca,
            host_paths=self.host_paths,
            version=__version__,
        )


@click.command()
@option("--sidecar-image", required=True, metavar="IMAGE", help="Image of the sidecar.")
@option(
    "--sidecar-pull-policy",
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    default="IfNotPresent",
    help="When nodes pull it.",
)
@option(
    "--reports-url",
    metavar="URL",
    help="Where sidecars report.  [default: https://keepstep-reports.NAMESPACE.svc:443]",
)
@option(
    "--reports-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    default="/reports/ca.crt",
    help="File with the authorities that sidecars check that URL with; it may change.",
)
@host_path_option
@option(
    "--tls-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default="/tls",
    help="Directory with tls.crt, tls.key, and path (where reviews are taken); they may change.",
)
@port_option(ADMISSION_PORT)
@log_level_option
@metrics_port_option
@namespace_option
@option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 30),
    default=TIMEOUT_S,
    metavar="SECONDS",
    help="How long the API server waits for an answer (timeoutSeconds of the webhook): a pod is"
    " answered before that, without a sidecar if need be.",
)
@option(
    "--drain",
    "drain_s",
    type=click.FloatRange(0, 60),
    default=_DRAIN_S,
    metavar="SECONDS",
    help="How long to go on answering after SIGTERM, until Services have noticed.",
)
def admission(**options: Any) -> None:
    """Serve the webhook that puts the sidecar into annotated pods.

    It reads CheckpointPolicies, CheckpointRuns, and what a namespace's limits and
    quotas leave; writes nothing, and lets every pod pass.

    \b
    Examples:
      keepstep-operator admission --namespace keepstep-system \\
        --sidecar-image keepstep/sidecar:0.1.0 --tls-dir /tls
    """
    log.configure("admission", level=options.pop("log_level"))
    options["reports_url"] = (
        options["reports_url"] or f"https://keepstep-reports.{options['namespace']}.svc:443"
    )
    asyncio.run(serve(AdmissionSettings(**options)))


async def serve(settings: AdmissionSettings) -> None:
    """Serve until SIGTERM, and then until all reviews under way are answered."""
    tls, metrics = ServerTls(lambda: read_mounted_pair(settings.tls_dir)), AdmissionMetrics()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(KubeClient(await find_access(), request_s=_READ_S))
        server = Admission(
            policies=Policies(client),
            records=ExistingRunReader(client),
            rooms=NamespaceLimitsReader(client),
            defaults=settings.injection_defaults,
            metrics=metrics,
            deadline_s=deadline_of(settings.timeout_s),
            path=settings.path,
        )

        ending = asyncio.Event()

        def ready() -> str:
            if ending.is_set():
                return "ending"
            known = settings.injection_defaults()
            return "" if known else "the CA of the reports API is not known yet"

        reloading = asyncio.create_task(tls.keep_fresh())
        async with (
            serve_application(
                metrics_application(metrics.registry, ready), port=settings.metrics_port
            ) as seen,
            serve_application(
                server.application(ready), port=settings.port, ssl_context=tls.context
            ) as port,
        ):
            info("admission.started", port=port, metrics_port=seen)
            await until_signal()
            ending.set()
            await asyncio.sleep(settings.drain_s)
        reloading.cancel()
    info("admission.stopped")


def _text(path: Path) -> str:
    """The file of a mounted Secret; '' while it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""
