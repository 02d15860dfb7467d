"""The metrics port is open to every pod: whoever connects there takes nothing from training."""

from __future__ import annotations

import http.client
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.harness import SidecarProcess, free_port


class Open:
    """A sidecar with few descriptors and a metrics port."""

    def __init__(self, sidecar: SidecarProcess, port: int) -> None:
        self.sidecar, self.port = sidecar, port

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 10, source_address=(source, 0))

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()


def limited(limit: str) -> tuple[str, ...]:
    """The program with fewer descriptors, by an option of `ulimit`."""
    begin = f'ulimit {limit} 128; exec "$0" "$@"'
    return ("bash", "-c", begin, sys.executable, "-m", "keepstep_sidecar")


@pytest.fixture
def open_port(memory_dir: Path, tmp_path: Path) -> Iterator[Open]:
    sidecar = SidecarProcess("gpt", memory_dir, tmp_path / "volume", tmp_path / "log")
    sidecar.program, port = limited("-n"), free_port()
    sidecar.start(KEEPSTEP_METRICS_PORT=str(port))
    yield Open(sidecar, port)
    sidecar.end()


def test_the_trainer_socket_answers_while_the_metrics_port_is_flooded(
    open_port: Open,
) -> None:
    with ExitStack() as stack:
        for number in range(200):
            held = stack.enter_context(open_port.connect(f"127.0.0.{2 + number % 9}"))
            held.sendall(b"GET /metrics HT")
            if number % 50 == 0:
                assert open_port.sidecar.get("/v1/status")["run"] == "gpt"
        assert open_port.get("/metrics") == 200, "nor is the port shut"
        assert open_port.get("/healthz") == 200
    assert len(open_port.sidecar.log.read_text().splitlines()) < 30


def test_a_connection_without_a_complete_request_is_closed_within_seconds(open_port: Open) -> None:
    with open_port.connect() as idle:
        idle.settimeout(25)
        idle.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        assert idle.recv(1) == b""


def test_invalid_http_requests_do_not_flood_the_log(open_port: Open) -> None:
    for _ in range(100):
        with open_port.connect() as rude:
            rude.sendall(b"GET /metrics HTTP/9.9\r\nno header\r\n\r\n")
            rude.recv(1000)
    lines = open_port.sidecar.log.read_text().splitlines()
    assert len(lines) < 30, lines[-1]


def test_the_soft_limit_of_descriptors_is_raised(memory_dir: Path, tmp_path: Path) -> None:
    sidecar = SidecarProcess("gpt", memory_dir, tmp_path / "volume", tmp_path / "log")
    sidecar.program = limited("-Sn")
    sidecar.start()
    try:
        assert sidecar.process is not None
        soft, hard = psutil.Process(sidecar.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    finally:
        sidecar.end()
    assert soft == hard > 128
