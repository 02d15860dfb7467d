"""`keepstep-operator reconcile` and `admission` as the chart starts them: they are ready, end well,
and go on for all whatever one pod or a stranger sends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp

from keepstep_operator.api.pod import parse_pod
from keepstep_operator.certificates.pki import make_authority, make_server
from tests.harness import until
from tests.operator.admission.reviews import NAME, ApiServersWebhook, write_pair
from tests.operator.apiserver import ApiServer, Body, put_policy
from tests.operator.injection.pods import DEFAULTS, policy_body, pytorch_job

SYSTEM = "keepstep-system"
REPORTS = f"keepstep-reports.{SYSTEM}.svc"


class Started:
    """A component, and what it has logged."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child, self.log = child, list[str]()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.child.stderr is not None
        async for line in self.child.stderr:
            self.log.append(line.decode(errors="replace"))

    async def logged(self, event: str) -> Body:
        """The line of its log with this event."""

        def line() -> Body | None:
            lines = [json.loads(line) for line in self.log if line.startswith("{")]
            found = next((line for line in lines if line["event"] == event), None)
            assert found or not self._reading.done(), f"it ended: {''.join(self.log)[-2000:]}"
            return found

        found: Body = await until(line, what=f"{event} in its log")
        return found

    async def readyz(self, port: int, path: str = "/readyz") -> int:
        url = f"http://127.0.0.1:{port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status

    async def end(self) -> None:
        """SIGTERM, after which it ends without an error."""
        self.child.send_signal(signal.SIGTERM)
        await self.ended()

    async def ended(self) -> None:
        async with asyncio.timeout(10):
            assert await self.child.wait() == 0
            await self._reading
        assert '.stopped"' in self.log[-1], self.log[-20:]
        assert "Traceback" not in "".join(self.log)

    async def close(self) -> None:
        if self.child.returncode is None:
            self.child.kill()
        await self.child.wait()
        await self._reading


@asynccontextmanager
async def started(
    server: ApiServer, directory: Path, component: str, *options: str, **environment: str
) -> AsyncIterator[Started]:
    """`server` runs already; `directory` gets its kubeconfig."""
    settings = {
        "KUBECONFIG": str(server.kubeconfig(directory)),
        "KEEPSTEP_NAMESPACE": SYSTEM,
        "KEEPSTEP_PORT": "0",
        "KEEPSTEP_METRICS_PORT": "0",
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "keepstep_operator.cli", component, *options,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, **settings, **environment},
    )  # fmt: skip
    component_ = Started(child)
    try:
        yield component_
    finally:
        await component_.close()


def _authority(directory: Path) -> bytes:
    """The authority of sidecars, as its Secret is mounted. Returns its certificate."""
    made = make_authority("peers", now=datetime.now(UTC), life=timedelta(days=1))
    write_pair(directory, made)
    (directory / "ca.crt").write_bytes(made.certificate)
    return made.certificate


class Admission:
    """Admission, and an API server's client of its webhook."""

    def __init__(
        self, server: ApiServer, process: Started, ports: Body, webhook: ApiServersWebhook
    ) -> None:
        self.server, self.process, self.port, self.webhook = server, process, ports["port"], webhook
        self._metrics_port = ports["metrics_port"]

    async def answers_ready(self, status: int) -> None:
        async def does() -> bool:
            return await self.process.readyz(self._metrics_port) == status

        await until(does)


@asynccontextmanager
async def admission(directory: Path, *options: str) -> AsyncIterator[Admission]:
    day, now = timedelta(days=1), datetime.now(UTC)
    pair = make_server((NAME,), now=now, life=day)
    tls = write_pair(directory / "tls", pair)
    (tls / "path").write_text("/inject")
    (tls / "ca.crt").write_text(DEFAULTS.reports_ca)
    server = ApiServer()
    settings = {
        "KEEPSTEP_TLS_DIR": str(tls),
        "KEEPSTEP_REPORTS_CA": str(tls / "ca.crt"),
        "KEEPSTEP_SIDECAR_IMAGE": DEFAULTS.sidecar_image,
        "KEEPSTEP_HOST_PATHS": "/mnt/nvme0 /var/lib/keepstep",
    }
    async with (
        server.running(),
        started(server, tls, "admission", *options, **settings) as process,
    ):
        ports = await process.logged("admission.started")
        async with ApiServersWebhook(ports["port"], bundle=pair.certificate) as webhook:
            made = Admission(server, process, ports, webhook)
            await made.answers_ready(200)
            yield made


# --- their readiness and their end ---------------------------------------------------------------


async def test_a_reconciler_without_an_api_server_waits_for_it_and_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    server = ApiServer(broken=1_000_000)
    _authority(tmp_path)
    option = f"--peer-ca-dir={tmp_path}"
    async with server.running(), started(server, tmp_path, "reconcile", option) as process:
        port = (await process.logged("reconcile.started"))["metrics_port"]
        assert await process.readyz(port, "/healthz") == 200
        assert await process.readyz(port) == 503
        await process.end()


async def test_admission_answers_pending_and_late_requests_during_shutdown(
    tmp_path: Path,
) -> None:
    policy = ("GET", "/apis/keepstep.dev/v1alpha1/namespaces/team-a/checkpointpolicies/default")
    async with admission(tmp_path, "--drain", "3") as running:
        waiting = asyncio.create_task(running.webhook.create(pytorch_job()))
        await until(lambda: policy in running.server.calls())
        running.process.child.send_signal(signal.SIGTERM)
        await running.answers_ready(503)
        late = asyncio.create_task(running.webhook.create(pytorch_job("master", rank=0)))
        await until(lambda: running.server.calls().count(policy) >= 2)
        put_policy(running.server, policy_body())
        for created, _ in (await waiting, await late):
            assert parse_pod(created).has_sidecar
        await running.process.ended()
