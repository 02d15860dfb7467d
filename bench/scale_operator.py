"""Measures how a run of thousands of ranks restarts through one operator: see `bench.scale`.

The reconciler and the stand-in for the API server are each a process of their own. All pods are
clients in this process, each with an address of its own. Their reports are made beforehand: first a
whole report of eight ranks, then changes each second, like a sidecar while a vote waits, until the
reply names all pods and the step to restore.
"""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tempfile
import time
from asyncio import sslproto
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import aiohttp
import msgspec

from bench.operator_load import Apart
from keepstep.core.ranks import Ranks
from keepstep_operator.api.model import PolicyRecord
from keepstep_operator.api.tiers import Peers
from keepstep_operator.reconcile import report_body
from keepstep_operator.reconcile.parsing import parse_pod_record
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.turns import Parts
from keepstep_sidecar.report.reporter import Rhythm
from tests.harness import until
from tests.operator.promises.surface import (
    PREFIX,
    Body,
    Cluster,
    Operator,
    held,
    pod,
    policy,
    rank,
    reconciler,
    report,
)
from tests.operator.reconcile.samples import accepted
from tests.operator.reconcile.serving import trusting

T = TypeVar("T")

NODE = 8
_MEMORY, _LOCAL = range(1_000_007, 1_000_011), range(1_000_004, 1_000_010, 2)
_ARCHIVED = range(1000, 101_000, 1000)
_GIVEN_UP_S = 330.0
"""The restart has failed after this time: after `readiness.START_S` a rank votes without an answer
from the operator."""
_AT_ONCE = 64
"""Limits concurrent requests: one process cannot be as fast as all pods."""


def whole_report(kind: str, node: int, world: int) -> Body:
    """The whole report of a pod whose ranks have four steps in memory, three on local, and a
    hundred in the archive. The pod keeps copies for the previous pod."""
    ranks = [
        _with_twins(kind, rank(one, world, memory=(*_MEMORY,), local=(*_LOCAL,), archive=_ARCHIVED))
        for one in range(node * NODE, node * NODE + NODE)
    ]
    before = (node - 1) % (world // NODE) * NODE
    copies = [
        _with_twins(
            kind,
            rank(one, world)
            | {
                "alive": False,
                "peer": [held(step, world, root=f"{step}/{one}") for step in _LOCAL],
                "peer_answer": "steps",
            },
        )
        for one in range(before, before + NODE)
    ]
    return report(*ranks, *copies, sequence=1, peer_address=f"10.0.{node >> 8}.{node & 255}:9443")


def _with_twins(kind: str, told: Body) -> Body:
    """Add twins to the shards of a rank's report; archived shards name none."""
    number = told["rank"]
    for tier in ("memory", "local", "peer"):
        for one in told.get(tier, []):
            same = range(number % NODE, one["world"], NODE) if kind == "ddp" else ()
            one["alike"] = Ranks.of(same)
    return told


@dataclass
class _Pod:
    """One simulated pod. `first_s`: when its whole report was answered. `done_s`: when the operator
    had told it all pods and the step to restore."""

    number: int
    token: str
    whole: bytes
    changes: bytes
    first_s: float = 0.0
    done_s: float = 0.0
    sent_bytes: int = 0
    heard_bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    async def come_back(self, url: str, trust: Any, at_once: asyncio.Semaphore) -> None:
        address = f"127.{1 + (self.number >> 16)}.{self.number >> 8 & 255}.{self.number & 255}"
        connector = aiohttp.TCPConnector(ssl=trust, limit=1, local_addr=(address, 0))
        timeout = aiohttp.ClientTimeout(total=60)
        failures, sequence, version = 0, 0, b""
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while not self.done_s:
                began, sequence = time.monotonic(), sequence + 1
                body = self.changes % (sequence, version) if self.first_s else self.whole
                async with at_once:
                    status, reply = await self._post(session, url, body)
                if status == 200:
                    failures, self.first_s = 0, self.first_s or time.monotonic()
                    version = reply["peers_version"].encode()
                    known = reply["all_peers"] and reply["plan"] and not reply["awaits"]
                    self.done_s = time.monotonic() if known else 0.0
                    pause_s = max(1.0, reply["least_gap_s"])
                else:
                    failures += 1
                    code = reply.get("code", str(status))
                    self.refused[code] = self.refused.get(code, 0) + 1
                    if status == 400:
                        raise RuntimeError(f"a report is refused: {reply['message']}")
                    pause_s = Rhythm().backoff_s(failures, urgent=True, chance=0.5)
                if not self.done_s:
                    await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))

    async def _post(
        self, session: aiohttp.ClientSession, url: str, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        self.sent_bytes += len(body)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            async with session.post(
                f"{url}/v1/reports", data=io.BytesIO(body), headers=headers
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, {"code": type(error).__name__}
        self.heard_bytes += len(text)
        return answer.status, msgspec.json.decode(text)


def _cluster(world: int) -> Cluster:
    found = Cluster(objects=dict([policy(peers={"replicas": 1})]))
    for node in range(world // NODE):
        found.bind(pod(node))
    return found


async def _serve(world: int) -> None:
    cluster = _cluster(world)
    async with cluster.running():
        print(cluster.port, flush=True)
        await asyncio.Event().wait()


@contextmanager
def _apart(world: int) -> Iterator[Cluster]:
    """The stand-in for the API server, in another process."""
    command = [sys.executable, "-m", "bench.scale_operator", str(world)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield cast(Cluster, Apart(f"http://127.0.0.1:{int(child.stdout.readline())}"))
        finally:
            child.kill()


async def _restart(kind: str, world: int, cluster: Cluster, directory: Path) -> dict[str, float]:
    pods = []
    for node in range(world // NODE):
        told = whole_report(kind, node, world) | {"peers_version": ""}
        changes = msgspec.json.encode(told | {"since": 1, "ranks": [], "epochs": []})
        changes = changes.replace(b"%", b"%%").replace(b'"sequence":1', b'"sequence":%d')
        changes = changes.replace(b'"peers_version":""', b'"peers_version":"%b"')
        pods.append(
            _Pod(
                node, str(pod(node)["metadata"]["uid"]), msgspec.json.encode(told),
                changes,
            )
        )  # fmt: skip
    sslproto.SSLProtocol.max_size = 16 << 10  # the default is 256 KiB for each connection
    async with reconciler(cluster, directory, "--host-path", PREFIX) as operator:
        await until(lambda: operator.knows(len(pods)), within_s=60, what="all pods are seen")
        return await _measured(operator, pods, trusting((directory / "tls.crt").read_bytes()))


async def _measured(operator: Operator, pods: list[_Pod], trust: Any) -> dict[str, float]:
    at_once = asyncio.Semaphore(_AT_ONCE)
    cpu_s, began = operator.cpu_s(), time.monotonic()
    async with asyncio.timeout(_GIVEN_UP_S), asyncio.TaskGroup() as group:
        for one in pods:
            group.create_task(one.come_back(operator.url, trust, at_once))
    heard_s = max(one.first_s for one in pods) - began
    done = sorted(one.done_s - began for one in pods)
    return {
        "all_reported_s": heard_s,
        "all_answered_s": done[-1],
        "last_report_to_last_answer_s": done[-1] - heard_s,
        "cpu_s": operator.cpu_s() - cpu_s,
        "rss_mib": operator.memory_mib(),
        "whole_report_bytes": len(pods[0].whole),
        "reports_bytes": sum(one.sent_bytes for one in pods),
        "replies_bytes": sum(one.heard_bytes for one in pods),
        "put_off": sum(sum(one.refused.values()) for one in pods),
    }


def restart(kind: str, world: int) -> dict[str, float]:
    """Measure from the first report until the last pod knows what to restore."""
    with tempfile.TemporaryDirectory() as directory, _apart(world) as cluster:
        return asyncio.run(_restart(kind, world, cluster, Path(directory) / "reconcile"))


def reports(kind: str, world: int) -> dict[str, float]:
    """CPU seconds of the reconciler's own work on the first report of each pod: to read it, to
    apply it, and to answer it. Runs in this process, without connections."""
    registry, found = Registry(), dict.fromkeys(("read_s", "take_s", "reply_s"), 0.0)
    pods = [parse_pod_record(pod(node)) for node in range(world // NODE)]
    records = [one for one in pods if one is not None]
    held = replace(accepted(peers=Peers(replicas=1)), namespace=records[0].namespace)
    registry.policy_seen(
        PolicyRecord(namespace=held.namespace, name=held.name, generation=1, policy=held)
    )
    for one in records:
        registry.pod_seen(one, at=0.0)
    for one in records:
        body = msgspec.json.encode(whole_report(kind, one.node_rank, world))
        began = time.process_time()
        report = _through(report_body.read(body))
        read = time.process_time()
        registry.reported(one.uid, report, at=0.0)
        taken = time.process_time()
        msgspec.json.encode(registry.reply(one.uid, at=0.0))
        answered = time.process_time()
        found["read_s"] += read - began
        found["take_s"] += taken - read
        found["reply_s"] += answered - taken
    return found | {"whole_report_bytes": len(body)}


def _through(parts: Parts[T]) -> T:
    try:
        while True:
            next(parts)
    except StopIteration as ended:
        return cast(T, ended.value)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
