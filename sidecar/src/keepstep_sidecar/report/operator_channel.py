"""Reports to the operator: over HTTPS, with the pod's token."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from keepstep.errors import UsageError
from keepstep.wire.reports import Peer, Report, ReportReply
from keepstep_sidecar.config.sidecar import Reporting
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.report.reporter import ReportFailed

_TIMEOUT = aiohttp.ClientTimeout(total=10.0, connect=5.0)
_NOBODY_S = 3
"""A node that acknowledges nothing for so long is taken for lost. The kernel of a slow process
still acknowledges."""
_REPLY_LIMIT_BYTES = 1 << 20

_decode = msgspec.json.Decoder(ReportReply).decode


class OperatorChannel:
    """See `reporter.Channel`: what the operator is trusted by, and what it need not repeat."""

    asked = False

    def __init__(self, config: Reporting, trust: ssl.SSLContext) -> None:
        self.address = config.address
        self._config = config
        self._trust = trust
        self._authorities = config.authorities()
        self._peers: tuple[Peer, ...] = ()
        self._peers_version = ""

    async def __aenter__(self) -> OperatorChannel:
        connector = aiohttp.TCPConnector(limit=1, socket_factory=_socket)
        self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def pushed(self) -> ReportReply | None:
        return None

    async def exchange(self, report: Report) -> ReportReply:
        """Send a report; the reply, with the list of peers also where it did not change. Raises
        ReportFailed."""
        reply = await self._post(replace(report, peers_version=self._peers_version))
        await self._learn(reply.authorities)
        if reply.peers_version == self._peers_version:
            return replace(reply, peers=self._peers)
        self._peers, self._peers_version = reply.peers, reply.peers_version
        return reply

    async def _learn(self, authorities: str) -> None:
        """Take over the authorities by which the operator is trusted from now on. A new authority
        signs only a day after it was announced, and the key of an old one may be in other hands."""
        if not authorities or authorities == self._authorities:
            return
        self._authorities = authorities
        try:
            self._trust = await asyncio.to_thread(self._config.learn, authorities)
        except (UsageError, OSError) as error:
            warn("authorities of the operator not taken over", reason=str(error))
        else:
            say("authorities of the operator taken over")

    async def _post(self, report: Report) -> ReportReply:
        headers = {
            "Authorization": f"Bearer {_token(self._config.token_file)}",
            "Content-Type": "application/json",
        }
        body = msgspec.json.encode(report)
        try:
            # No redirects: the token is for this address only.
            async with self._session.post(
                self.address,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=self._trust,
            ) as response:
                data = await _read(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReportFailed(_kind(error), f"{error or type(error).__name__}") from error
        if response.status != 200:
            raise ReportFailed(f"status {response.status}", data[:300].decode(errors="replace"))
        try:
            return _decode(data)
        except (ValueError, RecursionError) as error:
            raise ReportFailed("reply", f"the answer is none: {error}") from error


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that gives up a lost node after `_NOBODY_S` seconds, while it connects as well as
    later. (The first SYN is repeated once, after a second, and given up two seconds later.)"""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NOBODY_S * 1000)
    return made


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = b""
    async for piece in response.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > _REPLY_LIMIT_BYTES:
            raise ReportFailed("reply", "the operator's answer is too long")
    return data


def _token(path: Path) -> str:
    """Read the token anew each time: Kubernetes replaces the file before the token expires."""
    try:
        token = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise ReportFailed("token", f"cannot read the token: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise ReportFailed("token", f"{path} holds no token")
    return token


def _kind(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "tls"
    return "timeout" if isinstance(error, TimeoutError) else "connection"
