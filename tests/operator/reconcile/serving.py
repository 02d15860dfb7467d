"""A whole reconciler on loopback: real TLS in front, a stand-in for the API server behind."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from keepstep_operator.kube import Client
from keepstep_operator.reconcile.main import Clock, Reconciler
from keepstep_operator.serving import listening
from keepstep_operator.tls import ServerTls
from tests.certificates import make_certificate
from tests.operator.apiserver import ApiServer


@dataclass
class Served:
    """A running reconciler, and how to reach it."""

    parts: Reconciler
    cluster: ApiServer
    tls: ServerTls
    session: aiohttp.ClientSession
    port: int

    async def post(
        self, body: bytes, *, token: str = "", context: ssl.SSLContext | None = None
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"https://127.0.0.1:{self.port}/v1/reports"
        options = {"ssl": context} if context is not None else {}
        async with self.session.post(
            url, data=io.BytesIO(body), headers=headers, **options
        ) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(f"https://127.0.0.1:{self.port}{path}") as response:
            return response.status, await response.text()


@asynccontextmanager
async def serving(cluster: ApiServer, directory: Path, **more: Any) -> AsyncIterator[Served]:
    """Everything that `keepstep-operator reconcile` runs, until the block ends. `more`: of the
    `Reconciler`."""
    authority = make_certificate(directory)
    tls = ServerTls(directory)
    connector = aiohttp.TCPConnector(ssl=trusting(authority))
    async with (
        cluster.running(),
        Client(cluster.access) as client,
        aiohttp.ClientSession(connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        parts = Reconciler(client, group=group, clock=Clock(), **more)
        parts.start()
        async with listening(
            parts.reports.application(),
            port=0,
            host="127.0.0.1",
            ssl_context=tls.context,
            shutdown_s=0.1,
            one_request=True,
        ) as port:
            yield Served(parts, cluster, tls, session, port)
        parts.stop()


def trusting(pem: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=pem.decode())
