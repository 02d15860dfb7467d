"""`keepstep-operator certificates`: the process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from prometheus_client import Counter, Gauge

from keepstep_operator import journal
from keepstep_operator.certificates.keeper import CertificateKeeper, KeptCertificate
from keepstep_operator.journal import info, warn
from keepstep_operator.kube.access import find_access
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import KubeError
from keepstep_operator.serving import (
    metrics_application,
    metrics_registry,
    serve_application,
    until_signal,
)
from keepstep_operator.settings import (
    log_level_option,
    metrics_port_option,
    namespace_option,
    option,
)

_EVERY_S: Final = 15.0
_FIRST_S: Final = 2.0
"""The pause between two rounds until one has succeeded, because helm --wait waits for that."""


@dataclass(frozen=True, kw_only=True)
class CertificatesSettings:
    """The command's options. `release`: what the names of the release's objects begin with."""

    namespace: str
    release: str
    metrics_port: int

    @property
    def kept(self) -> tuple[KeptCertificate, ...]:
        """The webhook's certificate, of which the API server hears within a second; and the
        authority of sidecars, whose bundle a sidecar gets with its certificate, once a day."""
        service = f"{self.release}-admission.{self.namespace}.svc"
        return (
            KeptCertificate(
                secret=f"{self.release}-admission-tls",
                life=timedelta(days=90),
                overlap=timedelta(days=1),
                names=(service, f"{service}.cluster.local"),
                webhook=self.release,
            ),
            KeptCertificate(
                secret=f"{self.release}-peers-ca",
                life=timedelta(days=3650),
                overlap=timedelta(days=2),
            ),
        )


class CertificatesMetrics:
    """Every metric of this component. docs/metrics.md lists them, too."""

    def __init__(self) -> None:
        self.registry = metrics_registry()
        self.expiry = Gauge(
            "keepstep_certificate_expiry_timestamp_seconds",
            "When the certificate in use ends",
            ("secret",),
            registry=self.registry,
        )
        self.rounds = Counter(
            "keepstep_certificate_rounds",
            "Looks at a certificate",
            ("secret", "result"),
            registry=self.registry,
        )


@click.command()
@namespace_option
@option(
    "--release",
    metavar="NAME",
    default="keepstep",
    help="What the names of the release's objects begin with.",
)
@log_level_option
@metrics_port_option
def certificates(**options: Any) -> None:
    """Make and replace the certificate of the webhook, and the authority of sidecars.

    Replace one now with
    `kubectl annotate secret keepstep-peers-ca keepstep.dev/rotate-ca=now`.

    \b
    Examples:
      keepstep-operator certificates --namespace keepstep-system
    """
    journal.configure("certificates", level=options.pop("log_level"))
    asyncio.run(serve(CertificatesSettings(**options)))


async def serve(settings: CertificatesSettings) -> None:
    """Do rounds until SIGTERM. A failed round is logged and tried again."""
    metrics, kept = CertificatesMetrics(), asyncio.Event()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(KubeClient(await find_access()))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        loop = group.create_task(_rounds(client, settings, metrics, kept), name="rounds")

        def ready() -> str:
            return "" if kept.is_set() else "no round has succeeded yet: the log says why"

        async with serve_application(
            metrics_application(metrics.registry, ready), port=settings.metrics_port
        ) as port:
            info("certificates.started", metrics_port=port)
            await until_signal()
        loop.cancel()
    info("certificates.stopped")


async def _rounds(
    client: KubeClient,
    settings: CertificatesSettings,
    metrics: CertificatesMetrics,
    kept: asyncio.Event,
) -> None:
    """Do rounds for ever. Sets `kept` once all keepers have succeeded in one round."""
    keepers = {
        checkpoint.secret: CertificateKeeper(
            client, checkpoint, namespace=settings.namespace, clock=_now
        )
        for checkpoint in settings.kept
    }
    while True:
        failed = False
        for secret, keeper in keepers.items():
            result = "ok"
            try:
                used = await keeper.round()
                metrics.expiry.labels(secret).set(used.ends.timestamp())
            except KubeError as error:
                result, failed = "failed", True
                warn(
                    "certificate.check_failed",
                    secret=secret,
                    error=str(error),
                    http_status=error.status,
                )
            metrics.rounds.labels(secret, result).inc()
        if not failed:
            kept.set()
        await asyncio.sleep(_EVERY_S if kept.is_set() else _FIRST_S)


def _now() -> datetime:
    return datetime.now(UTC)
