"""What stands between a member and its leader, or in the member's place."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

from keepstep_sidecar.tiers.peer.member_frames import FrameKind, FrameParser, pack_frame
from keepstep_sidecar.tiers.peer.tls import TlsContextSource
from tests.leader.runs import credentials


class Proxy:
    """Forwards between a member and the leader. `drops`: forwards nothing, as a broken network."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.drops = False
        self._streams: list[asyncio.StreamWriter] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        self._streams += [writer, back]
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.drops:
                    writer.write(data)
                    await writer.drain()
            if not self.drops:
                writer.close()

    def cut(self) -> None:
        """Reset all connections."""
        for stream in self._streams:
            stream.transport.abort()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The address of the proxy."""
        tasks = set[asyncio.Task[None]]()

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(self._serve(reader, writer)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*tasks, return_exceptions=True)


class Raw:
    """A member made of a blocking socket, which need not keep to the protocol."""

    def __init__(
        self,
        address: str,
        *,
        node_rank: int = 1,
        own: TlsContextSource | None = None,
        sidecar: bytes | None = b"s" * 16,
    ) -> None:
        """`sidecar`: of the hello; None: say none."""
        tls = (own or credentials(node_rank)).current()
        host, _, port = address.rpartition(":")
        self.secure: ssl.SSLSocket = tls.member.wrap_socket(
            socket.create_connection((host, int(port)), timeout=10)
        )
        self._parser = FrameParser()
        self._found: list[tuple[FrameKind, bytes]] = []
        if sidecar is not None:
            self.secure.sendall(pack_frame(FrameKind.HELLO, sidecar))

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exception: object) -> None:
        self.secure.close()

    def send(self, body: bytes) -> None:
        self.secure.sendall(pack_frame(FrameKind.MESSAGE, body))

    def read(self) -> tuple[FrameKind, bytes] | None:
        """The next frame; None at the end."""
        while not self._found:
            if not (data := self.secure.recv(1 << 16)):
                return None
            self._found += self._parser.feed(data)
        return self._found.pop(0)

    def read_all(self) -> list[bytes]:
        """The frames that have come, of a socket that does not block."""
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := self.secure.recv(1 << 16):
                self._found += self._parser.feed(data)
        found, self._found = self._found, []
        return [body for _, body in found]

    def refusal(self) -> str:
        """Why the leader ends the connection."""
        while (found := self.read()) is not None:
            if found[0] is FrameKind.REFUSAL:
                return found[1].decode()
        return ""
