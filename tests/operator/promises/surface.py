"""The operator as the tests of this folder meet it: two processes on loopback and what they say.

What the tests assert is on the outside: reports and their replies, AdmissionReviews, what is asked
of the API server and written to it, memory and CPU of a process. Whatever of the operator's modules
a test cannot do without is imported here and nowhere else in this folder, so that a rebuilding of
those modules changes this file alone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import io
import itertools
import json
import logging
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import psutil
from aiohttp import web
from jsonpatch import apply_patch

from keepstep_operator.api.model import JobState
from keepstep_operator.api.pod import Injected
from keepstep_operator.api.run import RunStatus
from keepstep_operator.kube import CONFIG_MAPS, POLICIES, Client, KubeError, Resource
from keepstep_operator.reconcile.main import Reconciler
from keepstep_operator.reconcile.state.actions import AskJob, DeleteRun
from keepstep_operator.reconcile.token_auth import Refused, TokenAuth
from tests.certificates import make_certificate
from tests.harness import until
from tests.operator.admission.reviews import review_of
from tests.operator.apiserver import ApiServer, bound_to
from tests.operator.injection.pods import DEFAULTS
from tests.operator.reconcile.pod_bodies import pod_body, pod_path
from tests.operator.reconcile.samples import KEY, Play, run_object
from tests.operator.reconcile.samples import pod as record
from tests.operator.reconcile.serving import trusting
from tests.operator.reconcile.test_process import kubeconfig

Body = dict[str, Any]

NAMESPACE = "team"
SYSTEM = "keepstep-system"
RUN = "gpt-1a2b3c4d"
PREFIX = "/mnt/nvme0"
GROUP = "/apis/keepstep.dev/v1alpha1"
_MEMORY_BYTES = 2 << 30
_sequence = itertools.count(1)


# --- the reconciler ------------------------------------------------------------------------------


@dataclass
class Cluster(ApiServer):
    """The stand-in for the API server, with the few more things that a test here has it do.

    `busy_part`: the first list of each collection with this in its path is answered with 429, to
    come again after `busy_s`; `busy_at`: by path and selector, when it was asked for.
    """

    busy_part: str = ""
    busy_s: float = 0.0
    busy_at: dict[str, list[float]] = field(default_factory=dict)

    def _refused(self, request: web.Request) -> web.Response | None:
        path, labels = request.path, request.query.get("labelSelector", "")
        if self.busy_part and self.busy_part in path and not request.query.get("watch"):
            asked = self.busy_at.setdefault(f"{path} {labels}", [])
            asked.append(asyncio.get_running_loop().time())
            if len(asked) == 1:
                told = {"kind": "Status", "code": 429, "message": "too many requests"}
                after = {"Retry-After": f"{self.busy_s:.0f}"}
                return web.json_response(told, status=429, headers=after)
        return super()._refused(request)

    @property
    def targets(self) -> list[str]:
        """Path and query of each GET as it came, with nothing decoded."""
        return [one.target for one in self.requests if one.method == "GET"]

    def bind(self, pod: Body) -> str:
        """Put a pod there, and give it a token; returns the token, which is the pod's uid."""
        metadata = pod["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        self.tokens[uid] = bound_to(namespace, name, uid)
        self.add(pod_path(name, namespace), pod)
        return str(uid)

    def drop(self, pod: Body) -> None:
        """Delete a pod."""
        self.remove(pod_path(pod["metadata"]["name"], pod["metadata"]["namespace"]))

    def run(self, name: str = RUN, namespace: str = NAMESPACE) -> Body:
        """The CheckpointRun; empty while there is none."""
        return self.objects.get(f"{GROUP}/namespaces/{namespace}/checkpointruns/{name}", {})

    def conditions(self, name: str = RUN) -> dict[str, Body]:
        """Those of the CheckpointRun, by type."""
        told = (self.run(name).get("status") or {}).get("conditions") or []
        return {one["type"]: one for one in told}

    def made(self, plural: str) -> list[Body]:
        """What was created of a kind."""
        found = [one for one in self.requests if one.method == "POST"]
        return [one.body for one in found if one.path.endswith(f"/{plural}")]


@dataclass
class Operator:
    """A running `keepstep-operator reconcile`."""

    process: psutil.Process
    url: str
    metrics_url: str
    session: aiohttp.ClientSession
    log: list[str] = field(default_factory=list)

    async def report(self, body: Body | bytes, *, token: str) -> tuple[int, Body]:
        """Status and answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        url = f"{self.url}/v1/reports"
        async with self.session.post(url, data=io.BytesIO(data), headers=headers) as response:
            return response.status, await response.json()

    async def take(self, body: Body, *, token: str) -> Body:
        """The reply to a report that is no part of what is tested; one that comes too soon is sent
        again. Raises RuntimeError when it is refused."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 20.0
        while True:
            status, reply = await self.report(body, token=token)
            if status == 200:
                return reply
            if status != 429 or loop.time() > deadline:
                raise RuntimeError(f"{status}: {reply}; {''.join(self.log)[-2000:]}")
            await asyncio.sleep(0.25)

    async def ready(self) -> bool:
        async with self.session.get(f"{self.metrics_url}/readyz") as response:
            return response.status == 200

    async def metric(self, name: str) -> float:
        """The sum over all labels."""
        async with self.session.get(f"{self.metrics_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [one for one in lines if one.startswith((f"{name}{{", f"{name} "))]
        return sum(float(one.rsplit(" ", 1)[1]) for one in found)

    async def knows(self, pods: int) -> bool:
        """Whether it has seen so many pods."""
        return await self.metric("keepstep_run_pods") >= pods

    def cpu_s(self) -> float:
        """Of all its threads, to the microsecond where the kernel tells; else in ticks of 10 ms."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        exactly_s = sum(int(one.read_text().split()[0]) for one in threads) / 1e9
        times = self.process.cpu_times()
        return exactly_s or float(times.user + times.system)

    def memory_mib(self) -> float:
        return float(self.process.memory_info().rss) / (1 << 20)

    @property
    def alive(self) -> bool:
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE


@asynccontextmanager
async def reconciler(cluster: Cluster, directory: Path, *options: str) -> AsyncIterator[Operator]:
    """`keepstep-operator reconcile`, ready; `cluster` is served while it runs."""
    directory.mkdir(exist_ok=True)
    trust = trusting(make_certificate(directory))
    options = ("reconcile", "--namespace", SYSTEM, "--tls-dir", str(directory), *options)
    async with cluster.running():
        config = kubeconfig(cluster, directory / "kubeconfig")
        async with _process(options, config, trust) as operator:
            await until(operator.ready, what="reconcile's readiness")
            yield operator


@asynccontextmanager
async def _process(
    options: tuple[str, ...], config: Path, trust: ssl.SSLContext
) -> AsyncIterator[Operator]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "keepstep_operator.cli", *options,
        "--port", "0", "--metrics-port", "0",
        env={**os.environ, "KUBECONFIG": str(config)},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stderr is not None
    process, log = psutil.Process(child.pid), list[str]()
    process.rlimit(psutil.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    reading = None
    try:
        ports = await _ports(child.stderr, log)
        reading = asyncio.create_task(_drain(child.stderr, log))
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            url, metrics_url = f"https://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
            yield Operator(process, url, metrics_url, session, log)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        if reading is not None:
            await reading


async def _ports(stderr: asyncio.StreamReader, log: list[str]) -> tuple[int, int]:
    async for line in stderr:
        log.append(line.decode())
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if told.get("event") == "listening":
            return int(told["port"]), int(told["metrics_port"])
    raise RuntimeError(f"it ended before it listened: {''.join(log)[-2000:]}")


async def _drain(stderr: asyncio.StreamReader, log: list[str]) -> None:
    async for line in stderr:
        log.append(line.decode(errors="replace"))  # noqa: PERF401 - it is read meanwhile


async def promised(
    condition: Callable[[], Any], what: str | Callable[[], str], *, within_s: float = 3.0
) -> None:
    """What a test is about: AssertionError when it does not come true. What must be true before is
    waited for with `tests.harness.until`, whose failure is no broken promise but a broken test."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        value = condition()
        if await value if inspect.isawaitable(value) else value:
            return
        if loop.time() > deadline:
            raise AssertionError(
                f"not within {within_s} s: {what if isinstance(what, str) else what()}"
            )
        await asyncio.sleep(0.02)


# --- the webhook ---------------------------------------------------------------------------------


@dataclass
class Webhook:
    """A running `keepstep-operator admission`, and the API server that it reads."""

    server: ApiServer
    operator: Operator

    async def create(self, pod: Body) -> tuple[Body, list[str]]:
        """The pod as it would be stored, and the warnings that its creator sees."""
        url = f"{self.operator.url}/inject?timeout=5s"
        async with self.operator.session.post(url, json=review_of(pod)) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {await answer.text()}")
            response = json.loads(await answer.read())["response"]
        patch = (
            json.loads(base64.b64decode(response.get("patch", ""))) if "patch" in response else []
        )
        return apply_patch(pod, patch), response.get("warnings", [])


@asynccontextmanager
async def webhook(
    directory: Path, policy: Body, *, server: ApiServer | None = None, image: str = "sidecar:1"
) -> AsyncIterator[Webhook]:
    """`keepstep-operator admission`, ready. `server`: one that runs already."""
    directory.mkdir(exist_ok=True)
    trust = trusting(make_certificate(directory))
    options = ("admission", "--namespace", SYSTEM, "--tls-dir", str(directory), "--drain", "0")
    options += ("--sidecar-image", image, "--host-path", PREFIX)
    async with contextlib.AsyncExitStack() as stack:
        server = server or await stack.enter_async_context(ApiServer().running())
        server.put(CONFIG_MAPS, REPORTS_CA)
        server.put(POLICIES, policy)
        config = server.kubeconfig(directory)
        operator = await stack.enter_async_context(_process(options, config, trust))
        await until(operator.ready, what="admission's readiness")
        yield Webhook(server, operator)


REPORTS_CA: Body = {
    "metadata": {"name": "keepstep-reports-ca", "namespace": SYSTEM},
    "data": {"ca.crt": DEFAULTS.reports_ca},
}


# --- connections ---------------------------------------------------------------------------------


async def unfinished_reviews(
    url: str, count: int, *, sent_bytes: int
) -> list[asyncio.StreamWriter]:
    """Bodies of four sources that are longer than what comes of them."""
    port, context = int(url.rpartition(":")[2]), ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    head = f"POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: {sent_bytes + 1}\r\n\r\n".encode()
    found = []
    for number in range(count):
        source = f"127.0.2.{1 + number % 4}", 0
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, local_addr=source)
        writer.write(head + b" " * sent_bytes)
        found.append(writer)
    return found


async def idle_connections(url: str, count: int) -> list[ssl.SSLSocket]:
    """TLS connections that never send a whole request, until the server has refused some."""
    return await asyncio.to_thread(_idle, int(url.rpartition(":")[2]), count)


def _idle(port: int, count: int) -> list[ssl.SSLSocket]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    held: list[ssl.SSLSocket] = []
    refused = 0
    while len(held) < count and refused < 12:
        try:
            raw = socket.create_connection(("127.0.0.1", port), timeout=2)
        except OSError:
            refused += 1
            continue
        try:
            held.append(context.wrap_socket(raw))
            held[-1].sendall(b"POST /v1/reports HTTP/1.1\r\nHost: x\r\nAuthorization: Bea")
            held[-1].setblocking(False)
        except OSError:
            raw.close()
            refused += 1
    return held


def still_open(held: list[ssl.SSLSocket]) -> int:
    """How many of them the server has not ended."""
    return sum(map(_is_open, held))


def _is_open(one: ssl.SSLSocket) -> bool:
    try:
        return one.recv(4096) != b""
    except ssl.SSLWantReadError:
        return True
    except OSError:
        return False


# --- what is there and what is said ---------------------------------------------------------------


def pod(
    node_rank: int = 0,
    *,
    run: str = RUN,
    namespace: str = NAMESPACE,
    life: int = 1,
    node: str = "",
    job: Body | None = None,
) -> Body:
    """An injected pod as the API server has it. A new `life` is a new pod of that place."""
    body = pod_body(node_rank)
    metadata = body["metadata"]
    metadata["namespace"] = namespace
    metadata["uid"] = f"{namespace}-{run}-{node_rank}-{life}"
    metadata["name"] = f"{run}-worker-{node_rank}" + (f"-{life}" if life > 1 else "")
    metadata["creationTimestamp"] = f"2026-11-21T07:{life:02d}:00Z"
    metadata["labels"]["keepstep.dev/run-key"] = run
    told = json.loads(metadata["annotations"]["keepstep.dev/status"])
    told["job"] = job or {**told["job"], "name": run, "uid": f"job-{run}"}
    metadata["annotations"]["keepstep.dev/status"] = json.dumps(told)
    body["spec"]["nodeName"] = node or f"node-{node_rank}"
    return body


def policy(namespace: str = NAMESPACE, **spec: Any) -> tuple[str, Body]:
    """Path and body of the CheckpointPolicy that these pods name."""
    body = {
        "metadata": {"name": "default", "namespace": namespace, "uid": "p", "generation": 1},
        "spec": {
            "memory": {"limit": "1Gi", "slots": 4},
            "volumes": [{"name": "nvme0", "hostPath": {"path": PREFIX}}],
            **spec,
        },
    }
    return f"{GROUP}/namespaces/{namespace}/checkpointpolicies/default", body


def finished_run(name: str, *, at: str) -> tuple[str, Body]:
    """Path and body of a CheckpointRun whose job ended at that time."""
    recent = [{"time": at, "type": "Finished", "message": "the job is finished"}]
    body = {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"u-{name}", "generation": 1},
        "spec": {},
        "status": {"phase": "Finished", "recent": recent},
    }
    return f"{GROUP}/namespaces/{NAMESPACE}/checkpointruns/{name}", body


def epoch(number: int = 1, nonce: str = "aaaaaaaa") -> Body:
    return {"number": number, "nonce": nonce}


def held(step: int, world: int, *, of: Body | None = None, root: str = "") -> Body:
    """One image of a report."""
    found: Body = {"id": {"epoch": of or epoch(), "step": step}, "world": world}
    return {**found, "root": root} if root else found


def rank(
    number: int = 0,
    world: int = 1,
    *,
    memory: tuple[int, ...] = (),
    local: tuple[int, ...] = (),
    archive: tuple[int, ...] | None = None,
) -> Body:
    """One rank of a report, with steps by tier."""

    def at_rest(steps: tuple[int, ...]) -> Body:
        return tier(held(one, world, root=f"{one}/{number}") for one in steps)

    def tier(shards: Iterable[Body]) -> Body:
        found = list(shards)
        return {"answer": "steps" if found else "none", "shards": found}

    tiers = {"memory": tier(held(one, world) for one in memory), "local": at_rest(local)}
    if archive is not None:
        tiers["archive"] = at_rest(archive)
    return {"rank": number, "world": world, "alive": True, "tiers": tiers}


def report(*ranks: Body, **more: Any) -> Body:
    """What a sidecar sends; each one is newer than those before."""
    return {
        "sidecar": "0.1.0",
        "started_at": 1.0,
        "sequence": next(_sequence),
        "sent_at": 1.0,
        "ready": True,
        "library": "0.1.0",
        "epochs": [{"id": epoch()}],
        "ranks": list(ranks),
        **more,
    }


# --- inside: what no process shows in the time of a test ------------------------------------------


SAID_OF_A_POD = tuple(Injected.__dataclass_fields__)
"""Fields of the annotation keepstep.dev/status."""
SAID_OF_A_RUN = RunStatus.__struct_encode_fields__
"""Fields of CheckpointRun.status."""


class _Taking(Client):
    """Of an API server that takes whatever is JSON, and has nothing."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Any]] = []

    async def _call(self, method: str, path: str, **options: Any) -> Body:
        body = json.loads(msgspec.json.encode(options.get("body")))
        self.written.append((path, body))
        return body if isinstance(body, dict) else {}


class _Crashes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(self.format(record))


@dataclass
class Shown:
    """What became of objects that a reconciler was shown. `written`: path and body. `crashes`: with
    a traceback, where it failed at something, and left that out."""

    written: list[tuple[str, Any]]
    crashes: list[str]

    def status(self, run: str) -> Body:
        """As it was written last; empty when it was not."""
        path = f"{GROUP}/namespaces/{NAMESPACE}/checkpointruns/{run}/status"
        found = [body[0]["value"] for at, body in self.written if at == path]
        return found[-1] if found else {}

    def events(self, run: str) -> list[Body]:
        """On the CheckpointRun, or on its job, which has the same name."""
        found = [body for at, body in self.written if at.endswith("/events")]
        return [one for one in found if one["regarding"]["name"] == run]


def shown(*objects: tuple[str, Body], tells: Callable[[Shown], bool]) -> Shown:
    """A reconciler is shown objects, each by the feed of this name, until it `tells` what it must.
    AssertionError when it does not, or when an object ends it, as it would end the process."""
    handler, log = _Crashes(), logging.getLogger("keepstep.operator")
    log.addHandler(handler)
    try:
        return asyncio.run(_shown(objects, tells, handler.told))
    except Exception as error:
        raise AssertionError(f"the process ended: {getattr(error, 'exceptions', error)}") from error
    finally:
        log.removeHandler(handler)


async def _shown(
    objects: tuple[tuple[str, Body], ...], tells: Callable[[Shown], bool], crashes: list[str]
) -> Shown:
    """Its time passes as often as it asks for it, so nothing is waited for."""
    client, seconds = _Taking(), itertools.count(1_790_000_000.0)
    found = Shown(client.written, crashes)
    async with asyncio.TaskGroup() as group:
        options: Any = {"host_paths": (PREFIX,), "clock": lambda: next(seconds)}
        parts = Reconciler(client, group=group, **options)
        writers = [parts.writer.run(), parts.event_writer.run()]
        tasks = [group.create_task(one) for one in writers]
        feeds = {one.name: one for one in (*parts.objects, parts.pods)}
        for name, body in objects:
            feeds[name].take("ADDED", body)

        def ticked() -> bool:
            parts.errands.carry_out(parts.registry.tick(at=next(seconds)))
            return tells(found)

        await promised(ticked, lambda: f"written: {client.written}", within_s=20.0)
        for task in tasks:
            task.cancel()
        parts.stop()
    return found


@dataclass
class TokenServer:
    """What the operator asks about tokens: those that begin with `good` are. `away`: no answer.
    `asked`: about which."""

    away: bool = False
    asked: list[str] = field(default_factory=list)

    async def create(self, resource: Resource, body: Body, **options: Any) -> Body:
        if self.away:
            raise KubeError("the API server is away")
        token = body["spec"]["token"]
        self.asked.append(token)
        good = bound_to(NAMESPACE, "p", token) if token.startswith("good") else {}
        return {"status": good or {"authenticated": False}}


class Identities:
    """How the reports API knows senders, with a clock that a test moves."""

    def __init__(self) -> None:
        self.server = TokenServer()
        self.now = 1_790_000_000.0
        self._tokens = TokenAuth(cast(Client, self.server), clock=lambda: self.now)

    async def known(self, token: str) -> bool:
        """Whether a report with this token would be taken."""
        try:
            await self._tokens.identify(token)
        except Refused:
            return False
        return True


def ends_when_its_kind_may_not_be_read(days: int) -> bool:
    """Whether a run that has had no pod for so long, and whose kind of job the operator may not
    read, is taken for over; one look a day."""
    play = Play(record())
    play.find(run_object())
    play.lose(record())
    for _ in range(days):
        play.wait(24 * 3600.0)
        asked = [one for one in play.actions if isinstance(one, AskJob)]
        play.actions = [one for one in play.actions if not isinstance(one, AskJob)]
        for _ in asked:  # as `Denied` is answered
            play.note(play.registry.job_answered(KEY, JobState.UNKNOWN, at=play.now))
    return play.status.phase == "Finished" or any(
        isinstance(one, DeleteRun) for one in play.actions
    )
