"""The page of a run in a pod: who is let in, and what it costs the sidecar."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from keepstep_sidecar.ui.server import ENTRY_ROUTE
from tests.archive.gateway import free_port
from tests.harness import SidecarProcess, eventually

SECRET = "5f0c2f0e-7d0b-4a53-9d3c-0c4b7e8d9f10"


class Pod:
    """A sidecar with a page on `port`."""

    def __init__(self, sidecar: SidecarProcess, port: int) -> None:
        self.sidecar, self.port = sidecar, port

    def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        """The status, the text and the cookie."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers.get("Set-Cookie", "")

    @contextlib.contextmanager
    def entered(self) -> Iterator[str]:
        """The cookie of a browser, beside the command that got a token for it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", ENTRY_ROUTE, headers={"Authorization": f"Bearer {SECRET}"})
            answer = connection.getresponse()
            assert answer.status == 200
            token = answer.readline().decode().strip()
            status, _, cookie = self.get(f"/runs/gpt?token={token}")
            assert status == 200
            yield cookie.partition(";")[0]
            answer.close()

    def pages(self) -> list[psutil.Process]:
        """Processes of the page."""
        assert self.sidecar.process is not None
        children = psutil.Process(self.sidecar.process.pid).children()
        return [child for child in children if "page" in child.cmdline()]


@pytest.fixture
def pod(memory_dir: Path, tmp_path: Path) -> Iterator[Pod]:
    sidecar = SidecarProcess("gpt", memory_dir, tmp_path / "volume", tmp_path / "log")
    port = free_port()
    sidecar.start(KEEPSTEP_UI_PORT=str(port), KEEPSTEP_UI_SECRET=SECRET)
    yield Pod(sidecar, port)
    if sidecar.process is not None and sidecar.process.poll() is None:
        sidecar.terminate()  # which ends the page, too


def test_the_page_of_a_pod_requires_the_uid_of_the_pod(pod: Pod) -> None:
    for path in ("/", "/runs/gpt", "/runs/gpt/changes", "/static/page.js", ENTRY_ROUTE):
        status, text, _ = pod.get(path)
        assert status == 403
        assert "gpt" not in text
    assert pod.get(ENTRY_ROUTE, Authorization="Bearer wrong")[0] == 403
    with pod.entered() as cookie:
        status, text, _ = pod.get("/runs/gpt", Cookie=cookie)
    assert status == 200
    assert "A sidecar runs; no trainer has connected yet." in text
    assert str(pod.sidecar.volume) in text  # a volume, as /v1/status says it
    assert pod.get("/runs/gpt", Cookie="keepstep-ui=x", Authorization=f"Bearer {SECRET}")[0] == 403


def test_the_page_process_runs_only_while_there_is_a_viewer(pod: Pod) -> None:
    assert pod.pages() == []
    for _ in range(2):
        assert pod.get("/")[0] == 403
        (page,) = pod.pages()
        assert page.nice() == 19
        page.kill()
        page.wait(30)
        assert pod.sidecar.get("/v1/status")["run"] == "gpt"
    assert "page.crashed" in pod.sidecar.text()


def test_a_sidecar_without_a_page_port_works_without_the_page(
    memory_dir: Path, tmp_path: Path
) -> None:
    sidecar = SidecarProcess("gpt", memory_dir, tmp_path / "volume", tmp_path / "log")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sidecar.start(KEEPSTEP_UI_PORT=str(taken.getsockname()[1]), KEEPSTEP_UI_SECRET=SECRET)
        try:
            assert sidecar.get("/v1/status")["run"] == "gpt"
            eventually(lambda: "page.port_unavailable" in sidecar.text())
        finally:
            sidecar.end()
