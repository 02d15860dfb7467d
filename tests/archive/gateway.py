"""A real S3 gateway over a temporary directory, and a TCP proxy before it that breaks things."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import eventually

PROGRAM = shutil.which("versitygw")
ACCESS, SECRET = "keepstep", "keepstep-secret"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Gateway:
    """versitygw; its buckets are directories below `root`."""

    def __init__(self, root: Path, log: Path) -> None:
        self.root, self.log = root, log
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        root.mkdir(exist_ok=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Gateway:
        assert PROGRAM is not None
        command = [PROGRAM, "--port", f"127.0.0.1:{self.port}", "--quiet", "posix", str(self.root)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET},
            )
        eventually(self._answers, what=f"the gateway; its log is {self.log}")
        return self

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

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


class Proxy:
    """Forwards HTTP over TCP to a gateway, one request at a time and connection; an event loop on
    a thread of its own."""

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self.faults = Faults()
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Proxy:
        self._thread.start()
        self._do(self._listen())
        return self

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def stop(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)  # type: ignore[arg-type]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.faults.broken += 1
        finally:
            writer.close()
            self._tasks.discard(task)

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
        try:
            ours.write(re.sub(rb"\r\n\r\n$", b"\r\nConnection: close\r\n\r\n", head))
            while length:
                data = await reader.read(min(length, 1 << 20))
                ours.write(data)
                await ours.drain()
                length -= len(data)
            answer = await theirs.readuntil(b"\r\n\r\n")
            body = b"" if head_only else await theirs.read()
            flip = self.faults.flip
            if flip is not None and len(body) > flip:
                self.faults.broken += 1
                body = body[:flip] + bytes([body[flip] ^ 1]) + body[flip + 1 :]
            writer.write(answer + body)
            await writer.drain()
        finally:
            ours.close()
        return False


def _length(head: bytes) -> int:
    found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0


async def _drain(reader: asyncio.StreamReader, size: int) -> None:
    while size > 0:
        size -= len(await reader.read(min(size, 1 << 20)))


def _slow_down(status: int) -> bytes:
    body = (
        b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    )
    return b"HTTP/1.1 %d Slow Down\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
