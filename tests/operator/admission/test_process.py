"""`keepstep-operator admission` as a process: settings by environment, readiness, a clean end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from keepstep_operator.api.pod import parse_pod
from keepstep_operator.certificates.pki import Pair
from keepstep_operator.kube import CONFIG_MAPS
from tests.harness import until
from tests.operator.admission.reviews import ApiServersWebhook
from tests.operator.apiserver import ApiServer, put_policy
from tests.operator.injection.pods import DEFAULTS, policy_body, pytorch_job

_CONFIG_MAP = {
    "metadata": {"name": "keepstep-reports-ca", "namespace": "keepstep-system"},
    "data": {"ca.crt": DEFAULTS.reports_ca},
}


class Process:
    """A running component, and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = self.metrics_port = 0
        self.log = ""

    async def listening(self) -> None:
        """Read the log until the ports are known."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log += line.decode()
            if ports := re.search(r'"listening".*"port": (\d+), "metrics_port": (\d+)', self.log):
                self.port, self.metrics_port = int(ports[1]), int(ports[2])
                return
        pytest.fail(f"it ended: {self.log}")

    async def ended(self) -> int:
        assert self.process.stderr is not None
        self.log += (await self.process.stderr.read()).decode()
        return await self.process.wait()

    async def says_ready(self, status: int) -> None:
        """Wait until /readyz answers with `status`."""

        async def does() -> bool:
            return (await self.get("/readyz"))[0] == status

        await until(does)

    async def get(self, path: str) -> tuple[int, str]:
        """From the metrics port."""
        url = f"http://127.0.0.1:{self.metrics_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def _admission(
    server: ApiServer, tls_dir: Path, *options: str, **environment: str
) -> AsyncIterator[Process]:
    settings = {
        "KUBECONFIG": str(server.kubeconfig(tls_dir.parent)),
        "KEEPSTEP_NAMESPACE": "keepstep-system",
        "KEEPSTEP_SIDECAR_IMAGE": DEFAULTS.sidecar_image,
        "KEEPSTEP_TLS_DIR": str(tls_dir),
        "KEEPSTEP_HOST_PATHS": "/mnt/nvme0 /var/lib/keepstep",
        "KEEPSTEP_PORT": "0",
        "KEEPSTEP_METRICS_PORT": "0",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "keepstep_operator.cli", "admission", *options,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **settings, **environment},
    )  # fmt: skip
    try:
        running = Process(process)
        await running.listening()
        yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_at_its_end_it_answers_what_is_under_way_and_what_still_comes(
    tls_dir: Path, authority: Pair
) -> None:
    server = ApiServer()
    server.put(CONFIG_MAPS, _CONFIG_MAP)
    async with server.running(), _admission(server, tls_dir, "--drain", "0.5") as admission:
        async with ApiServersWebhook(admission.port, bundle=authority.certificate) as webhook:
            await admission.says_ready(200)
            waiting = asyncio.create_task(webhook.create(pytorch_job()))
            await until(lambda: ("GET", _POLICY) in server.calls())
            admission.process.send_signal(signal.SIGTERM)
            await admission.says_ready(503)
            late = asyncio.create_task(webhook.create(pytorch_job("master", rank=0)))
            await until(lambda: server.calls().count(("GET", _POLICY)) == 2)
            put_policy(server, policy_body())
            for created, _ in (await waiting, await late):
                assert parse_pod(created).has_sidecar
        assert await admission.ended() == 0
        assert '"event": "ended"' in admission.log


_POLICY = "/apis/keepstep.dev/v1alpha1/namespaces/team-a/checkpointpolicies/default"
