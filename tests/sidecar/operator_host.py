"""A small operator: hosts the real ledger behind a real HTTPS server on loopback."""

from __future__ import annotations

import asyncio
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web

from keepstep.core.ledger import Ledger, LedgerConfig, RestorePlan, Retire
from keepstep.core.retention import Retention
from keepstep.core.suspicion import Failure
from keepstep.steps import StepId, Tier
from keepstep.wire.reports import PATH, Peer, Report, ReportReply
from tests.certificates import make_certificate


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A certificate for localhost that is its own authority."""

    certificate: Path
    key: Path

    @property
    def pem(self) -> str:
        return self.certificate.read_text()


def make_identity(directory: Path) -> Identity:
    """Makes both files."""
    make_certificate(directory)
    return Identity(certificate=directory / "tls.crt", key=directory / "tls.key")


@dataclass
class Seen:
    """What came in. `tokens`: of every request; `reports`: of those that were taken."""

    tokens: list[str] = field(default_factory=list)
    reports: list[tuple[int, Report]] = field(default_factory=list)


def version(peers: tuple[Peer, ...]) -> str:
    """The version of this list of peers."""
    return f"{hash(peers):x}"


class OperatorHost:
    """Takes reports of tokens `node-<n>`; runs in a thread of its own."""

    def __init__(
        self,
        identity: Identity,
        *,
        world: int,
        keep: int = 2,
        port: int = 0,
        least_gap_s: float = 0.05,
    ) -> None:
        self.seen = Seen()
        self.restore_from: StepId | None = None
        self.awaits = ""
        self.gone_for_good = False
        self.pinned: tuple[StepId, ...] = ()
        self.failures: tuple[Failure, ...] = ()
        self.all_peers = False
        self.peers: tuple[Peer, ...] = ()
        self.authorities = ""
        self.leaving = False
        self.pem = identity.pem
        self.interval_s = 2.0
        self.port = port
        self._identity, self._world, self._least_gap_s = identity, world, least_gap_s
        self._ledger = Ledger(
            LedgerConfig(world=world, retention={Tier.LOCAL: Retention(last=keep)})
        )
        self._decode = msgspec.json.Decoder(Report).decode
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator")

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}{PATH}"

    def start(self) -> OperatorHost:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)

    def newest(self, node: int) -> Report | None:
        """The last report of a pod."""
        return next((one for at, one in reversed(self.seen.reports) if at == node), None)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())  # at the end connections whose handshake goes on are ended

    async def _serve(self) -> None:
        app = web.Application()
        app.add_routes([web.post(PATH, self._take)])
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

    async def _take(self, request: web.Request) -> web.Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.seen.tokens.append(token)
        if not token.startswith("node-"):
            return web.Response(status=401, text="who are you?")
        node = int(token.removeprefix("node-").split(".")[0])
        report = self._decode(await request.read())
        self.seen.reports.append((node, report))
        body = msgspec.json.encode(self._answer(node, report))
        return web.Response(body=body, content_type="application/json")

    def _answer(self, node: int, report: Report) -> ReportReply:
        ledger = self._ledger
        actions = ledger.apply(report.as_reported(node, ordered=len(self.seen.reports)))
        marks = {str(tier): ledger.watermark(tier) for tier in (Tier.MEMORY, Tier.LOCAL)}
        plan = ledger.plan(range(self._world))
        ranks, peers = {one.rank for one in report.ranks}, version(self.peers)
        return ReportReply(
            interval_s=self.interval_s,
            least_gap_s=self._least_gap_s,
            committed={tier: id for tier, id in marks.items() if id is not None},
            commits=ledger.committed(Tier.LOCAL),
            plan=plan.id if isinstance(plan, RestorePlan) else None,
            restore_from=self.restore_from,
            awaits=self.awaits,
            gone_for_good=self.gone_for_good,
            pinned=self.pinned,
            failures=self.failures,
            all_peers=self.all_peers,
            peers=() if peers == report.peers_version else self.peers,
            peers_version=peers,
            authorities=self.authorities,
            leaving=self.leaving,
            retire=tuple(
                one.id for one in actions if isinstance(one, Retire) and ranks & set(one.ranks)
            ),
        )
