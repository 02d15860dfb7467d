"""A real S3 gateway over a temporary directory, and a TCP proxy before it that breaks things.

rclone's S3 server (1.75) differs from S3 in two ways that matter here: it answers a range with 200,
and it takes no notice of `If-None-Match: *`. A process of this module stands before it and puts
both right: `python -m tests.archive.gateway PORT RCLONE_PORT ROOT`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from tests.harness import eventually, free_port

ACCESS, SECRET = "keepstep", "keepstep-secret"


def _program() -> str | None:
    """versitygw where it is installed, else the rclone that `requirements-dev.txt` brings; or what
    S3_GATEWAY names."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = os.environ.get("S3_GATEWAY")
    names = (program,) if program else ("versitygw", "rclone")
    return next(filter(None, (shutil.which(name, path=beside) for name in names)), None)


PROGRAM = _program()


class Gateway:
    """An S3 server whose buckets are directories below `root`."""

    def __init__(self, root: Path, log: Path) -> None:
        self.root, self.log = root, log
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        root.mkdir(exist_ok=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Gateway:
        environment = {**os.environ, "ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET}
        with self.log.open("ab") as log:
            self._processes = [
                subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                for command in self._commands()
            ]
        eventually(self._answers, what=f"the gateway; its log is {self.log}")
        return self

    def _commands(self) -> list[list[str]]:
        assert PROGRAM is not None
        listen = f"127.0.0.1:{self.port}"
        if Path(PROGRAM).name == "versitygw":
            return [[PROGRAM, "--port", listen, "--quiet", "posix", str(self.root)]]
        inner = free_port()
        words = ["--addr", f"127.0.0.1:{inner}", "--auth-key", f"{ACCESS},{SECRET}"]
        # it should know at once what a test puts into a bucket or breaks there (0 would spin)
        words += ["--config", os.devnull, "--vfs-cache-mode", "off", "--dir-cache-time", "1ms"]
        before = [sys.executable, "-m", "tests.archive.gateway", str(self.port), str(inner)]
        return [[PROGRAM, "serve", "s3", *words, str(self.root)], [*before, str(self.root)]]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as probe:
                probe.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return probe.recv(4) == b"HTTP"
        except OSError:
            return False

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def bucket(self, name: str) -> Path:
        """An empty bucket. The gateway takes directories of its root for buckets."""
        path = self.root / name
        path.mkdir()
        return path


@dataclass
class Faults:
    """What the proxy does to the next requests; counts what it did.

    `answer`: a status to give instead of forwarding, to requests that match `to`. `drop_after`:
    close the connection after so many bytes of a request. `delay_s`: before each request.
    `flip`: invert a bit in each answer that is longer than so many bytes, at that place.
    """

    answer: int | None = None
    to: str = ""
    drop_after: int | None = None
    delay_s: float = 0.0
    flip: int | None = None
    requests: int = 0
    broken: int = 0
    seen: list[str] = field(default_factory=list)


class _Connection(asyncio.StreamReaderProtocol):
    """One that came in; `open_ones` has it while it is open."""

    def __init__(
        self,
        open_ones: set[asyncio.BaseTransport],
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        super().__init__(asyncio.StreamReader(), serve)
        self._open_ones = open_ones

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._open_ones.add(transport)
        self._mine = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_ones.discard(self._mine)
        super().connection_lost(exc)


class Proxy:
    """Forwards HTTP over TCP to a gateway, one request at a time and connection; an event loop on
    a thread of its own. `corrects`: see the module; where the buckets of such a gateway lie."""

    def __init__(self, to: int, *, port: int | None = None, corrects: Path | None = None) -> None:
        self.port = port or free_port()
        self.faults = Faults()
        self._corrects = corrects
        self._to = to
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._connections: set[asyncio.BaseTransport] = set()
        """Both sides' that are open."""
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Proxy:
        self._thread.start()
        self._do(self._listen())
        return self

    async def _listen(self) -> None:
        def connection() -> asyncio.Protocol:
            return _Connection(self._connections, self._serve)

        self._server = await self._loop.create_server(connection, "127.0.0.1", self.port)

    def stop(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        """Nothing is left of what is under way, nor of what was just being accepted."""
        assert self._server is not None
        # Whoever was accepted and has no transport yet gets one first: a closed server refuses it
        # one, and asyncio leaves its socket open.
        for listener in self._server.sockets:
            self._loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)
        self._server.close()
        while self._connections or len(asyncio.all_tasks()) > 1:
            for connection in [*self._connections]:
                connection.abort()  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)  # type: ignore[arg-type]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            self.faults.broken += 1
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        faults = self.faults
        faults.requests += 1
        line = head.split(b"\r\n", 1)[0].decode()
        faults.seen.append(line)
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        length = _length(head)
        if faults.answer is not None and re.search(faults.to, line):
            await _drain(reader, length)
            faults.broken += 1
            writer.write(_slow_down(faults.answer))
            await writer.drain()
            return True
        if faults.drop_after is not None and length > faults.drop_after:
            await _drain(reader, faults.drop_after)
            faults.broken += 1
            return False
        if self._corrects is not None and _exists_already(head, self._corrects):
            await _drain(reader, length)
            writer.write(_error(412, "PreconditionFailed", "It exists already."))
            await writer.drain()
            return True
        return await self._forward(head, length, reader, writer, head_only=line.startswith("HEAD"))

    async def _forward(
        self,
        head: bytes,
        length: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        head_only: bool,
    ) -> bool:
        """Each request on a connection of its own, so that answers end with it."""
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._to)
        self._connections.add(ours.transport)
        try:
            ours.write(re.sub(rb"\r\n\r\n$", b"\r\nConnection: close\r\n\r\n", head))
            while length:
                data = await _some(reader, length)
                ours.write(data)
                await ours.drain()
                length -= len(data)
            answer = await theirs.readuntil(b"\r\n\r\n")
            if self._corrects is not None and b"\r\nContent-Range: " in answer:
                answer = answer.replace(b" 200 OK", b" 206 Partial Content", 1)
            body = b"" if head_only else await theirs.read()
            flip = self.faults.flip
            if flip is not None and len(body) > flip:
                self.faults.broken += 1
                body = body[:flip] + bytes([body[flip] ^ 1]) + body[flip + 1 :]
            writer.write(answer + body)
            await writer.drain()
        finally:
            ours.transport.abort()
            self._connections.discard(ours.transport)
        return False


def _length(head: bytes) -> int:
    found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0


async def _drain(reader: asyncio.StreamReader, size: int) -> None:
    while size > 0:
        size -= len(await _some(reader, size))


async def _some(reader: asyncio.StreamReader, most: int) -> bytes:
    """What has come, of a body of which `most` bytes are still to come."""
    if data := await reader.read(min(most, 1 << 20)):
        return data
    raise asyncio.IncompleteReadError(b"", most)


def _slow_down(status: int) -> bytes:
    return _error(status, "SlowDown", "Please reduce your request rate.")


def _error(status: int, code: str, message: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    head = f"HTTP/1.1 {status} {code}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def _exists_already(head: bytes, root: Path) -> bool:
    """Is this a PUT of a new object alone, where there is one?"""
    match = re.match(rb"PUT /([^ ?]+) ", head)
    if match is None or not re.search(rb"\r\nif-none-match: *\*", head, re.IGNORECASE):
        return False
    return (root / unquote(match[1].decode())).is_file()


def main() -> None:
    """Stand before rclone until killed."""
    port, to, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    Proxy(to, port=port, corrects=root).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
