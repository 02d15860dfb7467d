"""A small operator behind a real HTTPS server on loopback: it signs, and answers the run's leader
as it is told."""

from __future__ import annotations

import asyncio
import ssl
import threading
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from keepstep.wire.member_reports import CERTIFICATES_PATH, CertificateRequest
from keepstep.wire.run_reports import PATH, LeaderAnswer, LeaderRecord, RunReport
from keepstep_operator.certificates.pki import make_authority
from keepstep_operator.reconcile.peer_certificates import PeerCertificates
from keepstep_operator.reconcile.reports_api import check_bounds
from tests.certificates import make_certificate


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A certificate for localhost that is its own authority, and beside it an authority that signs
    for pods."""

    certificate: Path
    key: Path

    @property
    def pem(self) -> str:
        return self.certificate.read_text()


def make_identity(directory: Path) -> Identity:
    """Makes all files."""
    make_certificate(directory)
    (directory / "peers").mkdir()
    made = make_authority("peers", now=datetime.now(UTC), life=timedelta(days=3))
    (directory / "peers/tls.crt").write_bytes(made.certificate)
    (directory / "peers/tls.key").write_bytes(made.key)
    (directory / "peers/ca.crt").write_bytes(made.certificate)
    return Identity(certificate=directory / "tls.crt", key=directory / "tls.key")


@dataclass
class Seen:
    """What came in. `tokens`: of every request; `signed`: node ranks; `reports`: of the run."""

    tokens: list[str] = field(default_factory=list)
    signed: list[int] = field(default_factory=list)
    reports: list[RunReport] = field(default_factory=list)


class OperatorHost:
    """Takes tokens `node-<n>`, and keeps the record of the run as the real one does; runs in a
    thread of its own."""

    def __init__(self, identity: Identity, *, port: int = 0) -> None:
        self.seen = Seen()
        self.record = LeaderRecord()
        self.requested = LeaderAnswer(interval_s=1.0)
        self.pem = identity.pem
        self.port = port
        self._identity = identity
        self._signing = PeerCertificates(identity.certificate.parent / "peers")
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator")

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}{PATH}"

    @property
    def newest(self) -> RunReport | None:
        """The last report."""
        return self.seen.reports[-1] if self.seen.reports else None

    def ask(self, **fields: Any) -> None:
        """From now on this is asked of the run."""
        self.requested = replace(self.requested, **fields)

    def start(self) -> OperatorHost:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())  # at the end connections whose handshake goes on are ended

    async def _serve(self) -> None:
        app = web.Application()
        app.add_routes([web.post(PATH, self._take), web.post(CERTIFICATES_PATH, self._sign)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._identity.certificate, self._identity.key)
        site = web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self.port = runner.addresses[0][1]
        self._up.set()
        await self._stop.wait()
        await site.stop()
        assert runner.server is not None
        for connection in runner.server.connections:  # a TLS goodbye would outlast this loop
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        # a connection whose handshake goes on is not the server's yet
        for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        await asyncio.sleep(0)

    def _node_rank(self, request: web.Request) -> int:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.seen.tokens.append(token)
        if not token.startswith("node-"):
            raise web.HTTPUnauthorized(text="who are you?")
        return int(token.removeprefix("node-").split(".")[0])

    async def _take(self, request: web.Request) -> web.Response:
        assert self._node_rank(request) == 0, "node rank 0 leads"
        report = check_bounds(msgspec.json.decode(await request.read(), type=RunReport))
        self.seen.reports.append(report)
        if report.sequence > 1:
            self.record = report.record
        answer = replace(self.requested, record=self.record if report.sequence <= 1 else None)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _sign(self, request: web.Request) -> web.Response:
        node_rank = self._node_rank(request)
        asked = msgspec.json.decode(await request.read(), type=CertificateRequest)
        issued = self._signing.issue_certificate(f"keepstep://team/run/{node_rank}", asked)
        self.seen.signed.append(node_rank)
        return web.Response(body=msgspec.json.encode(issued), content_type="application/json")
