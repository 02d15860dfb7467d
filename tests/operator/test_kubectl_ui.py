"""`kubectl keepstep ui`: the page of a run on the viewer's machine, through the API server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep_operator.kube.resources import PODS, RUNS
from keepstep_sidecar.ui.run_figures import RunPage
from tests.harness import until
from tests.operator.apiserver import TOKEN, ApiServer
from tests.ui.conftest import Site, site_of

Plugin = Callable[..., Awaitable[asyncio.subprocess.Process]]
_CLI = "from keepstep_operator.kubectl.main import cli; cli()"
UID = "5f0c2f0e-7d0b-4a53-9d3c-0c4b7e8d9f10"
POD = "/api/v1/namespaces/n/pods/gpt-0"


def pod(name: str = "gpt-0", *, rank: int = 0, phase: str = "Running", port: str = "26742") -> Any:
    labels = {
        "keepstep.dev/injected": "true",
        "keepstep.dev/run-key": "gpt",
        "keepstep.dev/node-rank": str(rank),
    }
    env = [{"name": "KEEPSTEP_UI_PORT", "value": port}] if port else []
    return {
        "metadata": {"name": name, "namespace": "n", "uid": UID, "labels": labels},
        "spec": {"initContainers": [{"name": "keepstep-sidecar", "env": env}], "containers": []},
        "status": {"phase": phase},
    }


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().running() as server:
        server.put(RUNS, {"metadata": {"name": "gpt", "namespace": "n"}})
        server.put(PODS, pod())
        server.put(PODS, pod("gpt-1", rank=1))
        yield server


@pytest.fixture
async def site(server: ApiServer) -> AsyncIterator[Site]:
    """The page of the pod."""
    async with site_of({"gpt": RunPage(name="gpt")}, secret=UID) as site:
        server.forwards[POD] = int(site.base.rpartition(":")[2])
        yield site


@pytest.fixture
async def plugin(server: ApiServer, tmp_path: Path) -> AsyncIterator[Plugin]:
    """Starts `kubectl keepstep ui gpt`."""
    config = server.kubeconfig(tmp_path)
    begun: list[asyncio.subprocess.Process] = []

    async def start(*words: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CLI, "ui", *(words or ("gpt",)),
            env={**os.environ, "KUBECONFIG": str(config)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    found = re.fullmatch(r"run gpt: (http://127\.0\.0\.1:\d+/runs/gpt\?token=\S+)\n", line)
    assert found is not None, line
    return found[1]


async def _refusal(process: asyncio.subprocess.Process) -> str:
    _, text = await asyncio.wait_for(process.communicate(), 60)
    return text.decode()


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


async def test_the_printed_url_shows_the_live_run_to_a_single_browser(
    site: Site, plugin: Plugin
) -> None:
    process = await plugin()
    url = await _url(process)
    base = url.partition("/runs")[0]
    async with _client() as client, _client() as other:
        async with client.get(url) as answer:
            assert answer.status == 200
        async with other.get(url) as answer:
            assert answer.status == 403
        async with client.get(f"{base}/runs/gpt") as answer:
            assert "Run gpt" in await answer.text()
        async with client.get(f"{base}/static/page.js") as answer:
            assert int(answer.headers["Content-Length"]) == len(await answer.read())

        async def shows(text: str) -> bool:
            async with client.get(f"{base}/runs/gpt/changes") as answer:
                return text in await answer.text()

        assert await shows("No sidecar runs")
        site.views["gpt"] = RunPage(name="gpt", problems=("only one copy",))
        await until(lambda: shows("only one copy"), within_s=30)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_other_users_of_the_machine_are_shown_nothing(site: Site, plugin: Plugin) -> None:
    base = (await _url(await plugin())).partition("/runs")[0]
    async with _client() as client:
        for route in ("/", "/?token=wrong", "/runs/gpt", "/runs/gpt/changes", "/entry"):
            async with client.get(base + route) as answer:
                assert answer.status == 403
        async with client.get(base, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 421


async def test_the_request_to_a_pod_contains_its_uid_and_no_cluster_token(
    server: ApiServer, plugin: Plugin
) -> None:
    async with _recording(b"HTTP/1.1 200 OK\r\n\r\nabc\n", hold=True) as (port, received):
        server.forwards[POD] = port
        base = (await _url(await plugin())).partition("/runs")[0]
        async with _client() as client, client.get(base) as answer:
            assert answer.status == 200
        assert UID.encode() in received
        assert TOKEN.encode() not in received
        assert received.count(b"Authorization") == 1
    assert not server.asked("POST", "")  # nor is a token made


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n\x1b[2Jhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na b\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\n\x1b[2Jhello",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
    ],
)
async def test_an_invalid_page_response_is_refused_with_a_printable_message(
    server: ApiServer, plugin: Plugin, answer: bytes
) -> None:
    async with _recording(answer) as (port, _):
        server.forwards[POD] = port
        process = await plugin()
        text = await _refusal(process)
        assert process.returncode == 1
        assert "no page in pod gpt-0" in text
        assert "\x1b" not in text
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "pods", "code", "text"),
    [
        (("gpt",), [pod(phase="Pending")], 1, "no pod of node rank 0 of run gpt is running"),
        (("gpt",), [pod(port="")], 2, "serves no page"),
        (("other",), [pod()], 1, "other"),
        (("gpt", "--port", "70000"), [pod()], 2, "65535"),
        ((), [pod()], 2, "RUN"),
    ],
)
async def test_a_run_without_a_page_is_reported_with_the_reason(
    server: ApiServer, plugin: Plugin, words: tuple[str, ...], pods: list[Any], code: int, text: str
) -> None:
    for body in pods:
        server.put(PODS, body)
    process = await plugin(*(words or ("--port", "0")))
    assert text in await _refusal(process)
    assert process.returncode == code


@asynccontextmanager
async def _recording(answer: bytes, *, hold: bool = False) -> AsyncIterator[tuple[int, bytearray]]:
    """A server that keeps what it gets, and answers everything with `answer` and, unless it holds
    the connection, its end."""
    received, over = bytearray(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if hold:
            await over.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as made:
        yield made.sockets[0].getsockname()[1], received
        over.set()
