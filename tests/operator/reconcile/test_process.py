"""The process as the chart starts it: what it takes with 2,000 pods, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import yaml

from tests.certificates import make_certificate
from tests.operator.apiserver import ApiServer


def kubeconfig(cluster: ApiServer, path: Path) -> Path:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
        "clusters": [{"name": "one", "cluster": {"server": cluster.url}}],
        "users": [{"name": "me", "user": {"token": "operator"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@asynccontextmanager
async def process(cluster: ApiServer, directory: Path) -> AsyncIterator[tuple[psutil.Process, int]]:
    """`keepstep-operator reconcile` and the port of its metrics."""
    make_certificate(directory)
    config = kubeconfig(cluster, directory / "kubeconfig")
    command = ["-m", "keepstep_operator.cli", "reconcile", "--namespace", "keepstep-system"]
    command += ["--tls-dir", str(directory), "--port", "0", "--metrics-port", "0"]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        env={**os.environ, "KUBECONFIG": str(config)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stderr is not None
    try:
        port = 0
        async with asyncio.timeout(20):
            while not port:
                line = yaml.safe_load(await child.stderr.readline())
                port = int(line.get("metrics_port", 0))
        reading = asyncio.create_task(child.stderr.read())  # or its log would fill the pipe
        yield psutil.Process(child.pid), port
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await child.wait() == 0
            log = (await reading).decode()
        assert log.splitlines()[-1].count('"event": "ended"') == 1, log[-2000:]
        assert "Traceback" not in log
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def test_a_process_without_an_api_server_waits_for_it_and_ends_on_sigterm(tmp_path: Path) -> None:
    cluster = ApiServer(broken=1_000_000)

    async def run() -> None:
        async with cluster.running(), process(cluster, tmp_path) as (_, port):
            url = f"http://127.0.0.1:{port}"
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{url}/healthz") as response:
                    assert response.status == 200
                async with session.get(f"{url}/readyz") as response:
                    assert response.status == 503

    asyncio.run(run())
