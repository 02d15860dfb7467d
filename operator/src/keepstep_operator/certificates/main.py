"""`keepstep-operator certificates`: the process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import click
from prometheus_client import Counter, Gauge

from keepstep_operator import journal
from keepstep_operator.api.quantities import parse_duration
from keepstep_operator.certificates.keeper import (
    Keeper,
    Publisher,
    Server,
    publish_in_config_map,
    publish_in_webhook,
)
from keepstep_operator.certificates.peers import AuthorityKeeper, published_with_certificates
from keepstep_operator.certificates.rotation import Lifetimes
from keepstep_operator.journal import say, warn
from keepstep_operator.kube import Client, KubeError, find_access
from keepstep_operator.serving import listening, metrics_registry, observed, until_signal
from keepstep_operator.settings import (
    log_level_option,
    metrics_port_option,
    namespace_option,
    option,
)

_OVERLAP: Final = timedelta(days=1)
"""Clients learn of a new CA much sooner: the API server hears of a new caBundle within a second, a
sidecar with the reply to a report."""
_PEERS_OVERLAP: Final = timedelta(days=2)
"""A sidecar gets the bundle with its certificate, which is valid for a day."""
_FIRST_S: Final = 2.0
"""The longest pause between two rounds until one has succeeded, because helm --wait waits for
that."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The command's options. `overlap`: None for each server's default."""

    namespace: str
    admission_service: str
    reports_service: str
    reports_ca_configmap: str
    peers_name: str
    webhook_configuration: str
    authority_life: timedelta
    leaf_life: timedelta
    overlap: timedelta | None
    interval: timedelta
    metrics_port: int
    cert_manager: bool

    def lifetimes(self, overlap: timedelta) -> Lifetimes:
        return Lifetimes(
            authority=self.authority_life, leaf=self.leaf_life, overlap=self.overlap or overlap
        )


class Metrics:
    """Every metric of this component. docs/metrics.md lists them, too."""

    def __init__(self) -> None:
        self.registry = metrics_registry()
        self.expiry = Gauge(
            "keepstep_certificate_expiry_timestamp_seconds",
            "When the server's certificate ends",
            ("service",),
            registry=self.registry,
        )
        self.rounds = Counter(
            "keepstep_certificate_rounds",
            "Looks at a server's certificates",
            ("service", "result"),
            registry=self.registry,
        )


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    try:
        return None if value is None else timedelta(seconds=parse_duration(value))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command(short_help="Make and rotate the certificates of both servers.")
@namespace_option
@option(
    "--admission-service",
    metavar="NAME",
    default="keepstep-admission",
    help="Service of admission; its Secrets are NAME-ca and NAME-tls.",
)
@option(
    "--reports-service",
    metavar="NAME",
    default="keepstep-reports",
    help="Service of the reports API; its Secrets are NAME-ca and NAME-tls.",
)
@option(
    "--reports-ca-configmap",
    metavar="NAME",
    default="keepstep-reports-ca",
    help="ConfigMap that tells sidecars the CA of the reports API.",
)
@option(
    "--peers-name",
    metavar="NAME",
    default="keepstep-peers",
    help="The authority of sidecars' certificates; its Secret is NAME-ca.",
)
@option(
    "--webhook-configuration",
    metavar="NAME",
    default="keepstep",
    help="MutatingWebhookConfiguration whose caBundle is kept.",
)
@option(
    "--cert-manager",
    is_flag=True,
    help="cert-manager makes both servers' certificates and the webhook's caBundle: what is left is"
    " to tell sidecars the CA of the reports API, and the authority of peers.",
)
@option(
    "--ca-lifetime",
    "authority_life",
    metavar="DURATION",
    default="87600h",
    callback=_duration,
    help="Of an authority; the next one is made after two thirds of it.",
)
@option(
    "--leaf-lifetime",
    "leaf_life",
    metavar="DURATION",
    default="2160h",
    callback=_duration,
    help="Of a server's certificate; it is made anew after two thirds of it.",
)
@option(
    "--overlap",
    metavar="DURATION",
    callback=_duration,
    help="From the publication of a new CA to its use, and from there to the end of the old one."
    "  [default: 24h, 48h for sidecars' own]",
)
@option(
    "--interval",
    metavar="DURATION",
    default="15s",
    callback=_duration,
    help="Between two looks.",
)
@log_level_option
@metrics_port_option
@click.option("--once", is_flag=True, help="Do what is due now, and end.")
def certificates(once: bool, **options: Any) -> None:
    """Make and rotate the certificates of admission and of the reports API.

    Begin a rotation of an authority by hand with
    `kubectl annotate secret keepstep-admission-ca keepstep.dev/rotate-ca=now`.

    \b
    Examples:
      keepstep-operator certificates --namespace keepstep-system
      keepstep-operator certificates --namespace keepstep-system --once
    """  # fmt: skip
    journal.configure("certificates", level=options.pop("log_level"))
    settings = Settings(**options)
    asyncio.run(run_once(settings) if once else serve(settings))


async def run_once(settings: Settings) -> None:
    """Do one round. Raises KubeError."""
    async with Client(await find_access()) as client:
        for _, keeper in keepers(client, settings):
            await keeper.round()


async def serve(settings: Settings) -> None:
    """Do rounds until SIGTERM. A failed round is logged and tried again."""
    metrics, kept = Metrics(), asyncio.Event()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(await find_access()))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        loop = group.create_task(
            _rounds(keepers(client, settings), settings.interval, metrics, kept), name="rounds"
        )

        def ready() -> str:
            return "" if kept.is_set() else "no round has succeeded yet: the log says why"

        async with listening(observed(metrics.registry, ready), port=settings.metrics_port) as port:
            say("listening", metrics_port=port)
            await until_signal()
        loop.cancel()
    say("ended")


def keepers(client: Client, settings: Settings) -> list[tuple[str, Keeper | Publisher]]:
    """The keeper or publisher of each server, and of the authority of peers, with its name."""
    servers = (
        Server(
            service=settings.admission_service,
            publish=partial(publish_in_webhook, client, settings.webhook_configuration),
            lifetimes=settings.lifetimes(_OVERLAP),
        ),
        Server(
            service=settings.reports_service,
            publish=partial(
                publish_in_config_map, client, settings.namespace, settings.reports_ca_configmap
            ),
            lifetimes=settings.lifetimes(_OVERLAP),
        ),
    )
    peers = Server(
        service=settings.peers_name,
        publish=published_with_certificates,
        lifetimes=settings.lifetimes(_PEERS_OVERLAP),
    )
    namespace = settings.namespace
    authority = AuthorityKeeper(client, peers, namespace=namespace, clock=_now)
    if settings.cert_manager:
        reports = servers[-1]
        publisher = Publisher(client, reports, namespace=namespace)
        return [(reports.service, publisher), (peers.service, authority)]
    kept = (Keeper(client, one, namespace=namespace, clock=_now) for one in servers)
    return [*zip((one.service for one in servers), kept, strict=True), (peers.service, authority)]


async def _rounds(
    served: list[tuple[str, Keeper | Publisher]],
    interval: timedelta,
    metrics: Metrics,
    kept: asyncio.Event,
) -> None:
    """Do rounds for ever. Sets `kept` once all keepers have succeeded in one round."""
    while True:
        failed = False
        for service, keeper in served:
            result = "ok"
            try:
                leaf = await keeper.round()
                metrics.expiry.labels(service).set(leaf.not_after.timestamp())
            except KubeError as error:
                result, failed = "failed", True
                warn("round failed", service=service, reason=str(error), status=error.status)
            metrics.rounds.labels(service, result).inc()
        if not failed:
            kept.set()
        every_s = interval.total_seconds()
        await asyncio.sleep(every_s if kept.is_set() else min(every_s, _FIRST_S))


def _now() -> datetime:
    return datetime.now(UTC)
