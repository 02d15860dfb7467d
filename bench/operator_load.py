"""The operator at size: `python -m bench.operator_load` measures its resources and its delays.

The load: ten thousand pods of eight ranks in a thousand runs, each with a hundred archived steps; a
thousand finished runs; and twenty thousand pods without keepstep. The stand-in for the API server,
the reporters, and the probe of the reconciler's health are each a process of their own. This
process is the client of the webhook. The load is then measured beside five thousand connections
that ask for nothing, and beside one hostile tenant, whose pods send the most expensive reports that
the API accepts, as often as it lets them. `--scale 0.01` is a hundredth of the size. Needs what the
tests need.

(The module is not called `operator`: scripts in this folder would import it in place of the
standard library's.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from asyncio import sslproto
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import psutil
from aiohttp import web

from bench import machine
from keepstep.steps import EpochId, StepId
from keepstep_operator.reconcile.state.run_view import KeptStep
from keepstep_operator.reconcile.writers.checkpoint_objects import body_of, status_of
from keepstep_sidecar.report.reporter import Rhythm
from tests.harness import until
from tests.operator.promises.hostile import REPORTS
from tests.operator.promises.surface import (
    GROUP,
    Body,
    Cluster,
    Operator,
    Webhook,
    epoch,
    finished_run,
    foreign_pod,
    pod,
    policy,
    rank,
    reconciler,
    report,
    webhook,
)
from tests.operator.reconcile.serving import trusting

_RANKS, _STEP, _NAMESPACES = 8, 1_000_000, 100
_ARCHIVED_STEPS = tuple(range(1000, 101_000, 1000))
_NONCE = epoch()["nonce"]
_AT_ONCE = asyncio.Semaphore(64)
"""Limits concurrent reports: one process cannot be as fast as ten thousand pods, and without the
limit its own handshakes time out."""
_RESULTS = Path(__file__).parent / "results"
_BARS = {
    "rss_mib": 300.0, "cores": 0.5, "ready_s": 60.0, "condition_visible_s": 3.0,
    "slowest_health_ms": 20.0, "admission_p99_ms": 50.0,
    "hostile_reports_p99_added_s": 1.0, "hostile_condition_visible_added_s": 1.0,
    "idle_reports_p99_added_s": 0.1, "idle_condition_visible_added_s": 0.1,
    "idle_rss_added_mib": 32.0,
}  # fmt: skip
_HARM_EACH_S, _SETTLES_S = 0.05, 5.0
_PROMPT_S = 1.0
_HOSTILE, _HOSTILE_PODS = "hostile", 10
_IDLE_SOURCES = 50


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the load. `changes`: runs of which a condition changes, per second. `period_s`:
    the interval of each pod's reports. `idle`: connections that ask for nothing."""

    runs: int
    pods: int
    finished: int
    foreign: int
    changes: float
    idle: int
    period_s: float = 30.0

    @classmethod
    def scaled(cls, scale: float) -> Size:
        def part(count: int) -> int:
            return max(1, round(count * scale))

        return cls(
            runs=part(1000),
            pods=10,
            finished=part(1000),
            foreign=part(20_000),
            changes=20.0 * scale,
            idle=part(5000),
        )

    def changing(self, run: int) -> bool:
        """Whether each report of this run's first pod changes a condition."""
        return run < self.changes * self.period_s


# --- the API server ------------------------------------------------------------------------------


def _namespace(run: int) -> str:
    """The namespace of a run. Runs are spread over many namespaces, because the operator limits
    what all reports of one tenant together may cost."""
    return f"team-{run % _NAMESPACES}"


class Watched(Cluster):
    """The stand-in for the API server, which also records when `Committing` of a run changes."""

    changed: dict[str, list[tuple[float, str]]]

    def _write(self, method: str, path: str, body: Any, request: web.Request) -> web.Response:
        answer = super()._write(method, path, body, request)
        run = path.removesuffix("/status")
        if "/checkpointruns/" in run and run in self.objects:
            told = (self.objects[run].get("status") or {}).get("conditions") or []
            now = next((one["status"] for one in told if one["type"] == "Committing"), "")
            seen = self.changed.setdefault(run.rpartition("/")[2], [])
            if not seen or seen[-1][1] != now:
                seen.append((time.time(), now))
        return answer

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/bench":
            writes = sum(
                one.method in ("POST", "PATCH", "PUT", "DELETE")
                and not one.path.endswith("/tokenreviews")
                for one in self.requests
            )
            return web.json_response({"writes": writes, "changed": self.changed})
        return await super()._handle(request)


def _cluster(size: Size) -> Watched:
    found = Watched(objects=dict(policy(_namespace(run)) for run in range(_NAMESPACES)))
    found.changed = {}
    for run in range(size.runs):
        for number in range(size.pods):
            found.bind(pod(number, run=f"run-{run}", namespace=_namespace(run)))
        found.objects.update(_archived(size, run))
    found.objects.update([policy(_HOSTILE)])
    for one in _hostile_pods():
        found.bind(one)
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600))
    found.objects.update(finished_run(f"over-{one}", at=finished) for one in range(size.finished))
    found.objects.update(foreign_pod(one) for one in range(size.foreign))
    return found


def _hostile_pods() -> Iterator[Body]:
    """The pods of the hostile tenant. Each is a run of its own: pods of one run would take turns in
    their reports."""
    for number in range(_HOSTILE_PODS):
        yield pod(run=f"{_HOSTILE}-{number}", namespace=_HOSTILE)


def _archived(size: Size, run: int) -> Iterator[tuple[str, Body]]:
    """Path and body of a run and of each of its archived steps, as an earlier reconciler wrote
    them."""
    name, namespace, uid = f"run-{run}", _namespace(run), f"u-run-{run}"
    base = f"{GROUP}/namespaces/{namespace}"
    metadata = {"name": name, "namespace": namespace, "uid": uid, "generation": 1}
    yield f"{base}/checkpointruns/{name}", {"metadata": metadata, "spec": {}, "status": {}}
    for step in _ARCHIVED_STEPS:
        id = StepId(epoch=EpochId(number=1, nonce=_NONCE), step=step)
        kept = KeptStep(run=name, step=str(id), ranks=size.pods * _RANKS, tiers=("archive",))
        body = body_of(kept, namespace=namespace, owner_uid=uid)
        body["metadata"]["uid"] = f"u-{kept.name}"
        body["status"] = status_of(kept, since="", at=time.time())
        yield f"{base}/checkpoints/{kept.name}", body


async def _serve(size: Size) -> None:
    cluster = _cluster(size)
    async with cluster.running():
        print(cluster.port, flush=True)
        await asyncio.Event().wait()


@dataclass
class Apart:
    """The stand-in for the API server in another process."""

    url: str = ""

    @contextlib.contextmanager
    def started(self, scale: float) -> Iterator[Apart]:
        command = [sys.executable, "-m", "bench.operator_load", "--serve", "--scale", str(scale)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout is not None
                self.url = f"http://127.0.0.1:{int(child.stdout.readline())}"
                yield self
            finally:
                child.kill()

    async def seen(self) -> dict[str, Any]:
        """The number of writes so far, and when conditions changed."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/bench") as answer,
        ):
            found: dict[str, Any] = await answer.json()
            return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Apart]:
        """The interface that `reconciler` needs; the stand-in already runs."""
        yield self


# --- the sidecars --------------------------------------------------------------------------------


@dataclass
class Reporter:
    """One sidecar: a whole report, then changes."""

    size: Size
    run: int
    number: int
    known: int = 0
    sequence: int = 0
    toggled: list[tuple[float, bool]] = field(default_factory=list)
    answered: list[tuple[float, float]] = field(default_factory=list)

    @property
    def token(self) -> str:
        return f"{_namespace(self.run)}-run-{self.run}-{self.number}-1"

    def body(self) -> Body:
        self.sequence += 1
        world, first = self.size.pods * _RANKS, self.number * _RANKS
        ranks = [
            self._changes(one, world) if self.known else self._whole(one, world)
            for one in range(first, first + _RANKS)
        ]
        volume = {"name": "nvme0", "engine": "direct", "used_bytes": 1, "free_bytes": 1}
        return report(
            *ranks,
            sequence=self.sequence,
            since=self.known,
            epochs=[] if self.known else [{"id": epoch()}],
            volumes=[volume | {"failed": "no space is left" if self.stalls else ""}],
        )

    @property
    def stalls(self) -> bool:
        """Whether the report says why no step becomes committed. Every second report of a changing
        run's first pod does."""
        return self.size.changing(self.run) and self.number == 0 and self.sequence % 2 == 0

    @property
    def prompt(self) -> bool:
        """Whether the last report was answered at once."""
        return bool(self.answered) and self.answered[-1][1] < _PROMPT_S

    def _steps(self) -> tuple[int, ...]:
        newest = _STEP + self.sequence
        return newest, newest - 1, newest - 2, newest - 3

    def _whole(self, number: int, world: int) -> Body:
        local = (_STEP, _STEP - 10)
        return rank(number, world, memory=self._steps(), local=local, archive=_ARCHIVED_STEPS)

    def _changes(self, number: int, world: int) -> Body:
        newest, oldest = self._steps()[0], self._steps()[3] - 1
        told = rank(number, world, memory=(newest,))
        return told | {
            "local_answer": None,
            "gone": {"memory": [{"epoch": epoch(), "step": oldest}]},
        }

    async def go_on(self, operator: Operator) -> None:
        """Report until cancelled. The first reports of all pods are spread over a period."""
        loop = asyncio.get_running_loop()
        each_s = self.size.period_s / (self.size.runs * self.size.pods)
        await asyncio.sleep((self.run * self.size.pods + self.number) * each_s)
        while True:
            next_s, begun = loop.time() + self.size.period_s, time.time()
            reply = await self._told(operator, msgspec.json.encode(self.body()))
            self.answered.append((begun, time.time() - begun))
            follows = reply.get("changes_since") == self.sequence
            self.known = self.sequence if follows else 0
            if self.number == 0 and self.size.changing(self.run):
                self.toggled.append((time.time(), self.stalls))
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    async def _told(self, operator: Operator, body: bytes) -> Body:
        """Send a report. Like a sidecar, retry with pauses if the connection breaks or the operator
        asks to come later."""
        failures = 0
        while True:
            try:
                async with _AT_ONCE:
                    status, reply = await operator.report(body, token=self.token)
            except (aiohttp.ClientError, TimeoutError):
                status = 0
            if status == 200:
                return reply
            if status not in (0, 429, 503):
                raise RuntimeError(f"{status}: {reply}")
            failures += 1
            pause_s = Rhythm().backoff_s(failures, broken=not status, chance=random.random())
            await asyncio.sleep(pause_s)


# --- what is measured ----------------------------------------------------------------------------


def _ask_health(url: str) -> None:
    """Probe the health until killed; print a line with the milliseconds of each answer."""
    host = url.removeprefix("http://")
    while True:
        begun = time.perf_counter()
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        connection.close()
        print((time.perf_counter() - begun) * 1000, flush=True)
        time.sleep(0.02)


async def _admit(hook: Webhook, until_s: float) -> list[float]:
    """Inject pods, twenty per second, until `until_s`. Returns the milliseconds of each, sorted."""
    loop, spent = asyncio.get_running_loop(), list[float]()
    template = pod(0)
    template["metadata"]["labels"] = {}
    template["metadata"]["annotations"] = {"keepstep.dev/policy": "default"}
    template["spec"] = {"containers": [{"name": "pytorch", "image": "team/train:1"}]}
    while loop.time() < until_s:
        begun = loop.time()
        await hook.create(template)
        spent.append((loop.time() - begun) * 1000)
        await asyncio.sleep(max(0.0, 0.05 - (loop.time() - begun)))
    return sorted(spent)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What all reporters did. `toggled`: by run, when a report that changes a condition was
    answered, and whether it stalls commits. `answered`: when a report began, and how many seconds
    passed until it was accepted, with all its retries."""

    reports: int
    answered: list[tuple[float, float]]
    as_changes: float
    toggled: dict[int, list[tuple[float, bool]]]


async def _report(size: Size, url: str, certificate: Path) -> Told:
    """Report until SIGTERM. Prints a line when every reporter's whole report was accepted, and one
    when reports no longer wait for those that came late because of that. The figures count only
    what comes after it."""
    trust = trusting(certificate.read_bytes())
    sslproto.SSLProtocol.max_size = 16 << 10  # the default is 256 KiB for each connection

    async def go_on(one: Reporter) -> None:
        """Report from an address of its own like a pod: the operator accepts few connections from
        one source."""
        number = one.run * size.pods + one.number
        connector = aiohttp.TCPConnector(
            ssl=trust,
            limit=1,
            local_addr=(f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}", 0),
        )
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=60)
        ) as session:
            await one.go_on(Operator(psutil.Process(), url, "", session))

    reporters = [Reporter(size, run, one) for run in range(size.runs) for one in range(size.pods)]
    going = [asyncio.create_task(go_on(one)) for one in reporters]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await until(
        lambda: all(one.known for one in reporters), within_s=1800, what="all have told everything"
    )
    print(flush=True)
    await until(
        lambda: sum(one.prompt for one in reporters) >= 0.99 * len(reporters),
        within_s=1800, what="reports are answered promptly",
    )  # fmt: skip
    for one in reporters:
        one.toggled.clear()
        one.answered.clear()
    print(flush=True)
    await ended.wait()
    for task in going:
        task.cancel()
    await asyncio.gather(*going, return_exceptions=True)
    return Told(
        reports=sum(one.sequence for one in reporters),
        answered=[told for one in reporters for told in one.answered],
        as_changes=sum(one.known > 0 for one in reporters) / len(reporters),
        toggled={one.run: one.toggled for one in reporters if one.toggled},
    )


def _visible_s(told: Told, changed: dict[str, list[list[Any]]], phase: Phase) -> list[float]:
    """Seconds from the answer to a report that changes a condition until the object shows the
    change; sorted."""
    found = []
    for run, toggled in told.toggled.items():
        seen = changed.get(f"run-{run}", [])
        for at, stalls in toggled[1:-1]:
            says = "False" if stalls else "True"
            after = [when - at for when, status in seen if status == says and when > at - 1.0]
            if after and phase.has(at):
                found.append(max(0.0, min(after)))
    return sorted(found)


# --- who does harm -------------------------------------------------------------------------------


async def _harm(url: str) -> None:
    """Do harm until killed: each pod of one tenant sends the most expensive reports. It sends the
    next one soon after each answer, whatever the answer says."""
    bodies = [msgspec.json.encode(one() | {"sequence": 0}) for one in REPORTS]
    cut = [one.partition(b'"sequence":0') for one in bodies]

    async def go_on(token: str, first: int) -> None:
        connector = aiohttp.TCPConnector(
            ssl=False, limit=1, local_addr=(f"127.201.0.{1 + first}", 0)
        )
        async with aiohttp.ClientSession(connector=connector) as session:
            operator, number = Operator(psutil.Process(), url, "", session), first
            while True:
                number += 1
                before, _, behind = cut[number % len(cut)]
                body = b'%b"sequence":%d%b' % (before, number, behind)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await operator.report(body, token=token)
                await asyncio.sleep(_HARM_EACH_S)

    tokens = [one["metadata"]["uid"] for one in _hostile_pods()]
    await asyncio.gather(*(go_on(token, number) for number, token in enumerate(tokens)))


async def _idle(url: str, count: int) -> None:
    """Hold `count` connections open until killed, each with a handshake and a part of a request's
    head. A connection that ends is opened again."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = int(url.rpartition(":")[2])

    async def hold(number: int) -> None:
        address = f"127.202.0.{1 + number % _IDLE_SOURCES}"
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=context, local_addr=(address, 0),
                    ssl_handshake_timeout=60.0, limit=4096,
                )  # fmt: skip
                writer.write(b"POST /v1/reports HTTP/1.1\r\nHost: x\r\nAuthorization: Bea")
                await reader.read()
                writer.close()
            await asyncio.sleep(1.0)

    sslproto.SSLProtocol.max_size = 16 << 10
    await asyncio.gather(*(hold(number) for number in range(count)))


# --- the run -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What was measured from `since` to `until`, in Unix seconds. Lists of times are sorted."""

    since: float
    until: float
    cores: float
    rss_mib: float
    health_ms: list[float]
    admitted_ms: list[float]
    writes: int

    def has(self, at: float) -> bool:
        return self.since <= at < self.until

    @property
    def seconds(self) -> float:
        return self.until - self.since


@asynccontextmanager
async def _beside(*options: str) -> AsyncIterator[None]:
    """Run this program with `options` in another process meanwhile, after it has settled."""
    if not options:
        yield
        return
    async with _running(*options) as child:
        await asyncio.sleep(_SETTLES_S)
        yield
        if child.returncode is not None:
            raise SystemExit(f"{options[0]} ended too early, with {child.returncode}")


async def _phase(
    operator: Operator, hook: Webhook, apart: Apart, minutes: float, *harm: str
) -> Phase:
    """Measure for `minutes`, while a process with the options `harm`, if any, does harm."""
    loop = asyncio.get_running_loop()
    async with _beside(*harm), _running("--probe", operator.metrics_url) as probe:
        asked = asyncio.create_task(probe.communicate())
        since, cpu_s, before = time.time(), operator.cpu_s(), await apart.seen()
        admitted = await _admit(hook, loop.time() + minutes * 60)
        until, cpu_s, after = time.time(), operator.cpu_s() - cpu_s, await apart.seen()
        rss_mib = operator.memory_mib()
        probe.kill()
        health = sorted(float(one) for one in (await asked)[0].splitlines()[:-1])
    await asyncio.sleep(Size.period_s)  # delayed reports come before the next phase
    return Phase(
        since=since,
        until=until,
        cores=cpu_s / (until - since),
        rss_mib=rss_mib,
        health_ms=health or [float("nan")],
        admitted_ms=admitted,
        writes=after["writes"] - before["writes"],
    )


async def _measure(scale: float, apart: Apart, minutes: float, directory: Path) -> dict[str, float]:
    loop, size = asyncio.get_running_loop(), Size.scaled(scale)
    begun = loop.time()
    certificate = directory / "reconcile" / "tls.crt"
    async with (
        reconciler(cast(Cluster, apart), directory / "reconcile") as operator,
        webhook(directory / "admission", policy()[1]) as hook,
        _running("--report", operator.url, str(certificate), "--scale", str(scale)) as reporting,
    ):
        ready_s = loop.time() - begun
        assert reporting.stdout is not None
        await reporting.stdout.readline()
        taken_s = loop.time() - begun - ready_s
        await reporting.stdout.readline()
        settled_s = loop.time() - begun - ready_s
        await asyncio.sleep(size.period_s)  # for delayed writes
        to_begin = (await apart.seen())["writes"]
        usual = await _phase(operator, hook, apart, minutes)
        harmed = {
            "idle": await _phase(
                operator, hook, apart, minutes, "--idle", operator.url, "--scale", str(scale)
            ),
            # last, because the memory that it takes is not given back at once
            "hostile": await _phase(operator, hook, apart, minutes, "--harm", operator.url),
        }
        reporting.terminate()
        told = msgspec.json.decode((await reporting.communicate())[0], type=Told)
        changed = (await apart.seen())["changed"]
    seen = _seen(told, changed, usual)
    return {
        "pods": size.runs * size.pods,
        "ready_s": ready_s,
        "all_told_everything_s": taken_s,
        "all_prompt_s": settled_s,
        "rss_mib": usual.rss_mib,
        "cores": usual.cores,
        "reports": told.reports,
        "share_told_as_changes": told.as_changes,
        **seen,
        "slowest_health_ms": usual.health_ms[-1],
        "health_p99_ms": _p99(usual.health_ms),
        "api_writes_to_begin": to_begin,
        "api_writes_a_second": usual.writes / usual.seconds,
        "admission_p99_ms": _p99(usual.admitted_ms),
        **{
            f"{name}_{figure}": value
            for name, phase in harmed.items()
            for figure, value in _added(usual, seen, phase, _seen(told, changed, phase))
        },
    }


def _p99(found: list[float]) -> float:
    """The 99th percentile of a sorted list; NaN if it is empty."""
    return found[int(len(found) * 0.99)] if found else float("nan")


def _seen(told: Told, changed: dict[str, list[list[Any]]], phase: Phase) -> dict[str, float]:
    """The figures of the operator as runs saw it in `phase`."""
    visible = _visible_s(told, changed, phase)
    taken = sorted(seconds for begun, seconds in told.answered if phase.has(begun))
    return {
        "condition_visible_s": visible[-1] if visible else float("nan"),
        "conditions_seen": len(visible),
        "reports_p99_s": _p99(taken),
        "slowest_report_s": taken[-1] if taken else float("nan"),
    }


def _added(
    usual: Phase, seen: dict[str, float], phase: Phase, told: dict[str, float]
) -> Iterator[tuple[str, float]]:
    """The figures of a phase with harm: what it added for live runs, and how the operator did."""
    for name in ("reports_p99", "condition_visible"):
        yield f"{name}_added_s", told[f"{name}_s"] - seen[f"{name}_s"]
    yield "slowest_report_s", told["slowest_report_s"]
    yield "health_p99_ms", _p99(phase.health_ms)
    yield "slowest_health_ms", phase.health_ms[-1]
    yield "cores", phase.cores
    yield "rss_added_mib", phase.rss_mib - usual.rss_mib


@asynccontextmanager
async def _running(*options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """This program with `options` in another process, which ends with the context."""
    command = (sys.executable, "-m", "bench.operator_load", *options)
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _table(found: dict[str, float], size: Size, scale: float, minutes: float) -> str:
    about = machine.describe(Path("/tmp"))
    rows = [
        f"| {name} | {value:.4g} | "
        + (f"<= {_BARS[name]:g} | {'pass' if value <= _BARS[name] else '**FAIL**'} |"
           if name in _BARS else "- | |")
        for name, value in found.items()
    ]  # fmt: skip
    return "\n".join(
        [
            "# The operator at size",
            "",
            f"{size.runs * size.pods:,} pods of {_RANKS} ranks in {size.runs:,} runs,"
            f" {len(_ARCHIVED_STEPS)} archived steps each, {size.finished:,} finished runs,"
            f" {size.foreign:,} pods of others; a report of each pod every {size.period_s:.0f} s,"
            f" {size.changes:g} conditions a second change. The reporters and the stand-in for the"
            " API server run on the same cores. `hostile_`: the same beside one tenant whose"
            f" {_HOSTILE_PODS} pods send the dearest reports that are accepted; `idle_`: beside"
            f" {size.idle:,} connections from {_IDLE_SOURCES} addresses that ask for nothing;"
            " `_added`: beyond what it was without.",
            "",
            "; ".join(f"{name}: {value}" for name, value in about.items()),
            "",
            "| figure | measured | bar | |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"    python -m bench.operator_load --scale {scale:g} --minutes {minutes:g} --write",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the whole size")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of each phase, from when all have told all"
    )
    parser.add_argument("--write", action="store_true", help="the result into bench/results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--probe", default="", help=argparse.SUPPRESS)
    parser.add_argument("--harm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--idle", default="", help=argparse.SUPPRESS)
    parser.add_argument("--report", nargs=2, metavar=("URL", "CA"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = Size.scaled(options.scale)
    if options.probe:
        _ask_health(options.probe)
    elif options.harm:
        asyncio.run(_harm(options.harm))
    elif options.idle:
        asyncio.run(_idle(options.idle, size.idle))
    elif options.serve:
        asyncio.run(_serve(size))
    elif options.report:
        url, certificate = options.report
        told = asyncio.run(_report(size, url, Path(certificate)))
        sys.stdout.buffer.write(msgspec.json.encode(told))
    else:
        with tempfile.TemporaryDirectory() as directory, Apart().started(options.scale) as apart:
            found = asyncio.run(_measure(options.scale, apart, options.minutes, Path(directory)))
        table = _table(found, size, options.scale, options.minutes)
        print(json.dumps(found, indent=2), table, sep="\n\n")
        if options.write:
            (_RESULTS / f"{machine.slug()}-operator.md").write_text(table)


if __name__ == "__main__":
    main()
