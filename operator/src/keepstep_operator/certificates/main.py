"""`keepstep-operator certificates`: the process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

import click
from prometheus_client import Counter, Gauge

from keepstep_operator import log
from keepstep_operator.certificates.keeper import CertificateKeeper, KeptCertificate
from keepstep_operator.kube.access import find_access
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import KubeError
from keepstep_operator.log import info, warn
from keepstep_operator.serving import (
    metrics_application,
    metrics_registry,
    serve_application,
    until_signal,
)
from keepstep_operator.shared_options import (
    log_level_option,
    metrics_port_option,
    namespace_option,
    option,
)

_EVERY_S: Final = 15.0
_FIRST_S: Final = 2.0
"""The pause between two rounds until one has succeeded, because helm --wait waits for that."""


def kept_certificates(release: str, namespace: str) -> tuple[KeptCertificate, ...]:
    """The webhook's certificate, of which the API server hears within a second; and the authority
    of sidecars, whose bundle a sidecar gets with its certificate, once a day."""
    service = f"{release}-admission.{namespace}.svc"
    return (
        KeptCertificate(
            secret=f"{release}-admission-tls",
            life=timedelta(days=90),
            overlap=timedelta(days=1),
            names=(service, f"{service}.cluster.local"),
            webhook=release,
        ),
        KeptCertificate(
            secret=f"{release}-peers-ca", life=timedelta(days=3650), overlap=timedelta(days=2)
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
def certificates(*, namespace: str, release: str, log_level: str, metrics_port: int) -> None:
    """Make and replace the certificate of the webhook, and the authority of sidecars.

    Replace one now with
    `kubectl annotate secret keepstep-peers-ca keepstep.dev/rotate-ca=now`.

    \b
    Examples:
      keepstep-operator certificates --namespace keepstep-system
    """
    log.configure("certificates", level=log_level)
    kept = kept_certificates(release, namespace)
    asyncio.run(serve(kept, namespace=namespace, metrics_port=metrics_port))


async def serve(kept: Iterable[KeptCertificate], *, namespace: str, metrics_port: int) -> None:
    """Do rounds until SIGTERM. A failed round is logged and tried again."""
    metrics, succeeded = CertificatesMetrics(), asyncio.Event()
    async with KubeClient(await find_access()) as client, asyncio.TaskGroup() as group:
        keepers = [
            CertificateKeeper(client, certificate, namespace=namespace, clock=_now)
            for certificate in kept
        ]
        loop = group.create_task(_rounds(keepers, metrics, succeeded), name="rounds")

        def ready() -> str:
            return "" if succeeded.is_set() else "no round has succeeded yet: the log says why"

        app = metrics_application(metrics.registry, ready)
        async with serve_application(app, port=metrics_port) as port:
            info("certificates.started", metrics_port=port)
            await until_signal()
        loop.cancel()
    info("certificates.stopped")


async def _rounds(
    keepers: list[CertificateKeeper], metrics: CertificatesMetrics, succeeded: asyncio.Event
) -> None:
    """Do rounds for ever. Sets `succeeded` once all keepers have succeeded in one round."""
    while True:
        failed = False
        for keeper in keepers:
            result, secret = "ok", keeper.kept.secret
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
            succeeded.set()
        await asyncio.sleep(_EVERY_S if succeeded.is_set() else _FIRST_S)


def _now() -> datetime:
    return datetime.now(UTC)
