"""Two replicas and one Lease, against an API server that refuses the slower of two writers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from keepstep.wire.reports import AUDIENCE
from keepstep_operator.kube import LEASES, PODS, RUNS, TOKEN_REVIEWS, Client, KubeError
from keepstep_operator.reconcile.leadership import FencedClient, Leadership
from tests.certificates import make_certificate
from tests.harness import until
from tests.operator.apiserver import ApiServer, Body
from tests.operator.reconcile.pod_bodies import pod_path
from tests.operator.reconcile.test_process import kubeconfig

SYSTEM = "keepstep-system"
LEASE_S = 1.5
"""A tenth of the real one, and so are all pauses."""


@dataclass
class Replica:
    """One that stands by, or leads."""

    role: Leadership
    task: asyncio.Task[None]

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Stage:
    """An API server, and the replicas' pods on it."""

    server: ApiServer
    client: Client

    def replica(self, name: str) -> Replica:
        pod = {"metadata": {"name": name, "namespace": SYSTEM, "labels": {"app": "reconcile"}}}
        path = PODS.path(name, namespace=SYSTEM)
        if path not in self.server.objects:
            self.server.put(PODS, pod)
        role = Leadership(
            self.client, name="reconcile", namespace=SYSTEM, identity=name, lease_s=LEASE_S
        )

        async def live() -> None:
            await role.acquire()
            await role.hold()

        return Replica(role, asyncio.create_task(live()))

    def lease(self) -> Body:
        found: Body = self.server.objects[LEASES.path("reconcile", namespace=SYSTEM)]["spec"]
        return found

    def labelled(self) -> set[str]:
        pods = [one for path, one in self.server.objects.items() if "/pods/" in path]
        return {
            one["metadata"]["name"]
            for one in pods
            if one["metadata"]["labels"].get("keepstep.dev/leader")
        }


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    server = ApiServer()
    async with server.running(), Client(server.access) as client:
        yield Stage(server, client)


async def test_writes_of_a_replica_that_may_not_lead_any_more_never_leave_it() -> None:
    server, leads = ApiServer(), True
    async with server.running(), FencedClient(server.access, may_write=lambda: leads) as client:
        body = {"metadata": {"name": "gpt", "namespace": "team"}}
        await client.create(RUNS, body, namespace="team")
        leads = False
        await client.get(RUNS, "gpt", namespace="team")
        review = {"spec": {"audiences": [AUDIENCE], "token": "any"}}
        await client.create(TOKEN_REVIEWS, review)
        before = len(server.requests)
        for write in (
            client.create(RUNS, body, namespace="team"),
            client.patch(RUNS, "gpt", {}, namespace="team"),
            client.delete(RUNS, "gpt", namespace="team"),
        ):
            with pytest.raises(KubeError, match="another replica"):
                await write
        assert len(server.requests) == before


async def test_of_two_processes_one_works_and_the_other_is_ready_to_and_does_when_it_ends(
    tmp_path: Path,
) -> None:
    cluster = ApiServer()
    for name in ("a", "b"):
        cluster.put(PODS, {"metadata": {"name": name, "namespace": SYSTEM, "labels": {}}})
    make_certificate(tmp_path)
    async with cluster.running():
        config = kubeconfig(cluster, tmp_path / "kubeconfig")
        first, second = await _started(tmp_path, config, "a"), None
        try:
            await _says(first, "listening")
            second = await _started(tmp_path, config, "b")
            metrics = (await _says(second, "standing by"))["metrics_port"]
            url = f"http://127.0.0.1:{metrics}/readyz"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                assert response.status == 200
            first.send_signal(signal.SIGTERM)
            assert await first.wait() == 0
            await _says(second, "listening")
            await until(lambda: _labels(cluster, "b").get("keepstep.dev/leader") == "true")
        finally:
            for one in filter(None, (first, second)):
                if one.returncode is None:
                    one.kill()
                await one.wait()


def _labels(cluster: ApiServer, pod: str) -> Body:
    found: Body = cluster.objects[pod_path(pod, SYSTEM)]["metadata"].get("labels") or {}
    return found


async def _started(directory: Path, config: Path, name: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "keepstep_operator.cli", "reconcile", "--namespace", SYSTEM,
        "--tls-dir", str(directory), "--port", "0", "--metrics-port", "0",
        "--lease", "reconcile", "--pod-name", name,
        env={**os.environ, "KUBECONFIG": str(config)}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _says(process: asyncio.subprocess.Process, event: str) -> Body:
    """The line of its log with this event."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            told: Body = json.loads(line)
            if told["event"] == event:
                return told
    raise AssertionError(f"it ended before it said {event}")
