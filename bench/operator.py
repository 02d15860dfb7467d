"""Measures the reconciler with many runs: memory, cores, time to Ready and to a visible condition.

    python -m bench.operator                      1,000 runs of 10 pods, 20,000 pods of others
    python -m bench.operator --runs 100 --seconds 30

The reconciler is a process of its own, as the chart starts it. The API server of the tests and all
leaders are in this process, so on few cores they take the time that its waits are made of: memory
and cores are the reconciler's own. Each leader reports every 30 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from keepstep.leader.run_report import fit_to_size
from keepstep.steps import StepId, Tier
from keepstep.wire import run_reports as wire
from keepstep.wire.run_reports import Advisory, AdvisoryKind, KeptStep, RunReport
from keepstep_operator.certificates.pki import make_authority
from keepstep_operator.kube.resources import RUNS
from tests.operator.admission.reviews import write_pair
from tests.operator.apiserver import ApiServer, Body, bound_to, put_policy
from tests.operator.injection.pods import policy_body
from tests.operator.reconcile.samples import FIRST, node, pod_body, report
from tests.operator.reconcile.serving import trusting

PODS = 10
INTERVAL_S = 30.0
CHANGES = 20
WORST = 20
_NAMESPACE = "keepstep-system"
_NAME = f"keepstep-reports.{_NAMESPACE}.svc"


def pods_of(run: int) -> list[Body]:
    """The pods of one job."""
    bodies = [pod_body(rank) for rank in range(PODS)]
    for rank, body in enumerate(bodies):
        metadata = body["metadata"]
        metadata |= {"name": f"gpt-{run}-{rank}", "uid": f"pod-{run}-{rank}"}
        metadata["labels"]["keepstep.dev/run-key"] = f"gpt-{run:08d}"
        metadata["annotations"]["padding"] = "x" * 4000
    return bodies


def cluster(runs: int, foreign: int) -> ApiServer:
    """All pods; a tenth of the foreign ones are of jobs."""
    made = ApiServer()
    put_policy(made, {**policy_body(), "metadata": {"name": "default", "namespace": "team"}})
    for run in range(runs):
        for body in pods_of(run):
            name = body["metadata"]["name"]
            made.objects[f"/api/v1/namespaces/team/pods/{name}"] = body
        made.tokens[f"of-{run}"] = bound_to("team", f"gpt-{run}-0", f"pod-{run}-0")
    for number in range(foreign):
        labels = {"batch.kubernetes.io/job-name": "x"} if number % 10 == 0 else {"app": "x"}
        metadata = {"name": f"f{number}", "namespace": "other", "uid": f"f{number}"}
        body = {"metadata": {**metadata, "labels": labels}, "status": {"phase": "Running"}}
        made.objects[f"/api/v1/namespaces/other/pods/f{number}"] = body
    return made


class Leader:
    """The leader of one run, a step a report."""

    def __init__(self, run: int, kept: int) -> None:
        self.run = run
        self.kept = kept
        self.sequence = 0
        self.stalls = False
        self.hostile = 0

    def worst(self) -> RunReport:
        """As long as is accepted, and new in each part."""
        text = f"{self.hostile:03} " + "x" * 450
        doubts = tuple(Advisory(kind=kind, text=text) for kind in AdvisoryKind)[
            : wire.MOST_MESSAGES
        ]
        run_report = replace(
            report(1000 + self.sequence, sequence=self.sequence, leader=f"leader-{self.run}"),
            nodes=tuple(
                node(rank, pod=f"pod-{self.run}-{rank}", warnings=(f"{self.hostile} " + "w" * 150,))
                for rank in range(wire.MOST_NODES)
            ),
            kept=tuple(
                KeptStep(step=str(StepId(FIRST.id, 1000 * self.hostile + index)), ranks=80,
                     tiers=(Tier.ARCHIVE,))
                for index in range(wire.MOST_KEPT)
            ),
            doubts=doubts,
            alarms=tuple(
                wire.ReportedAlarm(kind=f"Kind{index}", text=text)
                for index in range(wire.MOST_MESSAGES)
            ),
            recent=tuple(
                wire.RunEvent(time=wire.format_utc(time.time()), type="Restored", message=text)
                for _ in range(wire.MOST_RECENT)
            ),
        )  # fmt: skip
        return fit_to_size(run_report, lambda run_report: len(msgspec.json.encode(run_report)))

    def report(self) -> RunReport:
        self.sequence += 1
        if self.hostile:
            return self.worst()
        doubt = Advisory(kind=AdvisoryKind.COMMIT_STALLED, text="no step became committed")
        return replace(
            report(1000 + self.sequence, sequence=self.sequence, leader=f"leader-{self.run}"),
            nodes=tuple(node(rank, pod=f"pod-{self.run}-{rank}") for rank in range(PODS)),
            kept=tuple(KeptStep(step=str(StepId(FIRST.id, index)), ranks=80, tiers=(Tier.ARCHIVE,))
                       for index in range(self.kept)),
            certain=True,
            doubts=(doubt,) if self.stalls else (),
        )  # fmt: skip


class Load:
    """All leaders, and how their reports are answered."""

    def __init__(self, session: aiohttp.ClientSession, url: str, runs: int, kept: int) -> None:
        self._session = session
        self._url = url
        self.leaders = [Leader(run, kept) for run in range(runs)]
        self.answers_s: list[float] = []
        self.refused = 0

    async def send(self, leader: Leader) -> bool:
        """Returns whether the report was taken in."""
        body = msgspec.json.encode(leader.report())
        headers = {"Authorization": f"Bearer of-{leader.run}"}
        began = time.perf_counter()
        async with self._session.post(
            self._url, data=body, headers=headers, server_hostname=_NAME
        ) as answer:
            await answer.read()
            taken = answer.status == 200
        self.refused += not taken
        self.answers_s.append(time.perf_counter() - began)
        return taken

    async def lead(self, leader: Leader) -> None:
        """Report for ever, at times of its own."""
        await asyncio.sleep(random.uniform(0, INTERVAL_S))
        while True:
            await self.send(leader)
            await asyncio.sleep(INTERVAL_S)


@asynccontextmanager
async def reconciler(server: ApiServer, directory: Path) -> AsyncIterator[tuple[Any, Body]]:
    """The process, and its ports."""
    settings = {
        "KUBECONFIG": str(server.kubeconfig(directory)), "KEEPSTEP_NAMESPACE": _NAMESPACE,
        "KEEPSTEP_TLS_DIR": str(directory), "KEEPSTEP_PORT": "0", "KEEPSTEP_METRICS_PORT": "0",
    }  # fmt: skip
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "keepstep_operator.cli", "reconcile"),
        f"--peer-ca-dir={directory}", env={**os.environ, **settings},
        stderr=asyncio.subprocess.PIPE, limit=1 << 20,
    )  # fmt: skip
    assert child.stderr is not None
    ports: Body = {}
    while ports.get("event") != "reconcile.started":
        if not (line := await child.stderr.readline()):
            raise RuntimeError(f"the reconciler ended with {await child.wait()}")
        ports = json.loads(line) if line.startswith(b"{") else {}
    reading = asyncio.create_task(_discard(child.stderr))
    try:
        yield psutil.Process(child.pid), ports
    finally:
        child.terminate()
        await child.wait()
        await reading


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


async def measure(runs: int, foreign: int, kept: int, seconds: float) -> Body:
    """The figures."""
    server = cluster(runs, foreign)
    with tempfile.TemporaryDirectory() as name:
        authority = make_authority("peers", now=datetime.now(UTC), life=timedelta(days=1))
        write_pair(Path(name), authority)
        (Path(name) / "ca.crt").write_bytes(authority.certificate)
        trust = trusting(authority.certificate)
        connector = aiohttp.TCPConnector(ssl=trust, limit=64)
        async with (
            server.running(),
            reconciler(server, Path(name)) as (process, ports),
            aiohttp.ClientSession(connector=connector) as session,
        ):
            began = time.monotonic()
            await _ready(session, ports["metrics_port"])
            found: Body = {"ready_s": round(time.monotonic() - began, 1)}
            load = Load(session, f"https://127.0.0.1:{ports['port']}/v1/runs", runs, kept)
            leading = [asyncio.create_task(load.lead(leader)) for leader in load.leaders]
            await _shown(server, lambda status: status.get("step"), runs)
            found["all_shown_s"] = round(time.monotonic() - began, 1)
            while sum("/checkpoints/" in body for body in server.objects) < runs * kept:  # noqa: ASYNC110
                await asyncio.sleep(5.0)
            found["all_kept_s"] = round(time.monotonic() - began, 1)
            spent, at = process.cpu_times(), time.monotonic()
            load.answers_s.clear()
            await asyncio.sleep(seconds)
            used = process.cpu_times()
            cpu_s = used.user + used.system - spent.user - spent.system
            found["cores"] = round(cpu_s / (time.monotonic() - at), 3)
            answers = sorted(load.answers_s)
            found["answered_s_99"] = round(answers[int(0.99 * len(answers))], 3)
            found["visible_s"] = await _visible(server, load)
            found["memory_mib"] = round(process.memory_info().rss / (1 << 20))
            found["refused"] = load.refused
            for task in leading:
                task.cancel()
            found["worst_report_cpu_s"] = await _worst(process, load)
    return {"runs": runs, "pods": runs * PODS, "foreign": foreign, **found}


async def _worst(process: psutil.Process, load: Load) -> float:
    """Processor time that each of the largest reports takes, with what is written of it meanwhile,
    while nobody else reports. There is one event loop, so it keeps others waiting no longer."""
    leader = load.leaders[0]
    await asyncio.sleep(2.0)
    before, taken = process.cpu_times(), 0
    for number in range(WORST):
        leader.hostile = number + 1
        taken += await load.send(leader)
        await asyncio.sleep(1.1)  # reports within a second are refused
    if not taken:
        raise RuntimeError("none of the largest reports was taken in")
    after = process.cpu_times()
    return round((after.user + after.system - before.user - before.system) / taken, 3)


async def _ready(session: aiohttp.ClientSession, port: int) -> None:
    while True:
        async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.1)


def _status(server: ApiServer, run: int) -> Body:
    path = RUNS.path(f"gpt-{run:08d}", namespace="team")
    return server.objects.get(path, {}).get("status") or {}


async def _shown(server: ApiServer, what: Any, runs: int) -> None:
    while not all(what(_status(server, run)) for run in range(runs)):  # noqa: ASYNC110
        await asyncio.sleep(0.5)


async def _visible(server: ApiServer, load: Load) -> float:
    """The longest time from a report until the API server has the condition of it."""
    found = []
    for leader in random.sample(load.leaders, min(CHANGES, len(load.leaders))):
        leader.stalls, began = True, time.monotonic()
        while not await load.send(leader):  # noqa: ASYNC110 - within a second of its last one
            await asyncio.sleep(0.1)
        while _status(server, leader.run).get("protected") != "False":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        found.append(time.monotonic() - began)
    return round(max(found), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--foreign", type=int, default=20_000)
    parser.add_argument("--kept", type=int, default=100, help="archived steps of each run")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the steady state")
    options = parser.parse_args()
    found = asyncio.run(measure(options.runs, options.foreign, options.kept, options.seconds))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
