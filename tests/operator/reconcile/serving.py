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
import msgspec
import pytest
from kopf._cogs.clients.auth import APIContext

from keepstep.wire.run_reports import PATH, RunReport
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.resources import RUNS
from keepstep_operator.reconcile.main import Parts, ReconcileSettings
from keepstep_operator.reconcile.peer_certificates import PeerCertificates
from keepstep_operator.serving import serve_application
from keepstep_operator.tls_reload import ServerTls, read_mounted_pair
from tests.certificates import make_certificate
from tests.harness import until
from tests.operator.apiserver import ApiServer, Body
from tests.operator.reconcile.samples import KEY


@dataclass
class Served:
    """A running reconciler, and how to reach it."""

    parts: Parts
    cluster: ApiServer
    tls: ServerTls
    session: aiohttp.ClientSession
    port: int

    async def post(
        self, body: bytes, *, token: str = "", path: str = PATH
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"https://127.0.0.1:{self.port}{path}"
        async with self.session.post(url, data=io.BytesIO(body), headers=headers) as response:
            return response.status, await response.json()

    async def report(self, run_report: RunReport, *, token: str = "good") -> Body:
        """The answer to a report that is taken in."""
        self.parts.reports._lately.clear()  # a test does not wait for a second to pass
        status, answer = await self.post(msgspec.json.encode(run_report), token=token)
        assert status == 200, answer
        return answer

    def status(self) -> Body:
        """CheckpointRun.status as the API server has it; empty without one."""
        path = RUNS.path(KEY.name, namespace=KEY.namespace)
        found: Body = self.cluster.objects.get(path, {}).get("status") or {}
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason; '' for a condition that is not shown."""
        for condition in self.status().get("conditions", ()):
            if condition["type"] == kind:
                return condition["status"], condition["reason"]
        return "", ""


@asynccontextmanager
async def serving(
    cluster: ApiServer, directory: Path, *, watching: bool = True, **options: Any
) -> AsyncIterator[Served]:
    """Everything that `keepstep-operator reconcile` runs, until the block ends. `watching` False:
    its API alone, which looks up pods that it does not know. `options`: of the command."""
    authority = make_certificate(directory)
    (directory / "ca.crt").write_bytes(authority)
    tls = ServerTls(lambda: read_mounted_pair(directory))
    connector = aiohttp.TCPConnector(ssl=trusting(authority))
    settings = {
        "host_paths": (),
        "watch_nodes": False,
        "peer_ca_dir": directory,
        "reports_service": "keepstep-reports",
        "port": 0,
        "metrics_port": 0,
        "namespace": "keepstep-system",
        **options,
    }
    async with cluster.running(), KubeClient(cluster.access) as client:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("KUBECONFIG", str(cluster.kubeconfig(directory)))
            contexts = _sessions_of_kopf(patched)
            async with aiohttp.ClientSession(connector=connector) as session:
                parts = Parts(client, ReconcileSettings(**settings), PeerCertificates(directory))
                working = asyncio.create_task(
                    parts.work_until_ending() if watching else parts.rounds.load_runs_and_pods()
                )
                try:
                    async with serve_application(
                        parts.reports.application(),
                        port=0,
                        ssl_context=tls.context,
                        shutdown_s=0.1,
                    ) as port:
                        await until(
                            lambda: working.done() or (watching and not parts.why_not_ready())
                        )
                        yield Served(parts, cluster, tls, session, port)
                finally:
                    parts.ending.set()
                    await working
                    for context in contexts:
                        await context.close()


def _sessions_of_kopf(patched: pytest.MonkeyPatch) -> list[APIContext]:
    """The sessions that kopf opens from now on. If it ends while it asks which resources there
    are, it opens one more after it closed the first, and a later test would be blamed for that."""
    opened: list[APIContext] = []
    begin = APIContext.__init__

    def remember(context: APIContext, info: Any) -> None:
        begin(context, info)
        opened.append(context)

    patched.setattr(APIContext, "__init__", remember)
    return opened


def trusting(pem: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=pem.decode())
