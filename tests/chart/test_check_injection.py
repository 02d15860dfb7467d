"""What `helm test` runs, against a server on loopback that answers as an API server would."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from charts.keepstep.files import check_injection
from tests.certificates import make_certificate
from tests.chart.charts import Object


class ApiServer(http.server.ThreadingHTTPServer):
    """Answers each POST with the next of `answers`, (status, body, warning); the last one again."""

    daemon_threads = True

    def __init__(self, account: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_certificate(account))
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.answers: list[tuple[int, Object, str]] = []
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ApiServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"]))
        answers = self.server.answers
        status, body, warning = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        if warning:
            self.send_header("Warning", f'299 - "{warning}"')
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account's directory; the server makes ca.crt."""
    (tmp_path / "token").write_text("a-token\n")
    return tmp_path


@pytest.fixture
def server(account: Path) -> Iterator[ApiServer]:
    """Listening until the test ends."""
    with ApiServer(account) as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield one
        one.shutdown()
        thread.join(10)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_injection, "_PAUSE_S", 0.01)


def test_an_injected_pod_passes_and_is_only_a_dry_run(server: ApiServer, account: Path) -> None:
    server.answers = [(201, _injected(), "")]
    assert _check(server, account) == []
    assert server.asked == [("/api/v1/namespaces/steps/pods?dryRun=All", "Bearer a-token")]


def test_a_pod_without_a_sidecar_fails_with_what_admission_said(
    server: ApiServer, account: Path
) -> None:
    server.answers = [(201, check_injection.annotated_pod("default"), "no policy default")]
    found = "\n".join(_check(server, account, within_s=0.05))
    assert 'label keepstep.dev/injected="true"' in found
    assert "first init container is not keepstep-sidecar" in found
    assert "KEEPSTEP_SOCKET" in found
    assert "no policy default" in found


def _check(server: ApiServer, account: Path, *, within_s: float = 20.0) -> list[str]:
    found: list[str] = check_injection.check(
        server.url, "steps", "default", account=account, within_s=within_s
    )
    return found


def _injected() -> Object:
    pod: Object = check_injection.annotated_pod("default")
    pod["metadata"]["labels"] = {"keepstep.dev/injected": "true"}
    pod["spec"]["initContainers"] = [{"name": "keepstep-sidecar", "restartPolicy": "Always"}]
    pod["spec"]["containers"][0]["env"] = [{"name": "KEEPSTEP_SOCKET", "value": "/run/x"}]
    return pod


def _certificate(account: Path) -> Path:
    """Written as ca.crt; returns the file with the key in it."""
    pem = make_certificate(account)
    (account / "ca.crt").write_bytes(pem)
    both = account / "both.pem"
    both.write_bytes(pem + (account / "tls.key").read_bytes())
    return both
