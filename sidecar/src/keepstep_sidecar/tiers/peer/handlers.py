"""Handles requests of another pod, in blocking code. `server` has checked its identity before."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from mmap import mmap
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from keepstep.errors import (
    FormatError,
    ImageError,
    KeepstepError,
    NoSpaceError,
    StorageError,
    UsageError,
)
from keepstep.image import MAX_HEADER_BYTES, PAGE_BYTES
from keepstep.image.layout import CHUNK_BYTES
from keepstep.wire.trainer import Problem
from keepstep_sidecar.log import warn
from keepstep_sidecar.tiers.peer import protocol
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.tiers.peer.protocol import receive_into
from keepstep_sidecar.tiers.peer.served_shards import OpenShard, ServedShards
from keepstep_sidecar.tiers.peer.tls import PodIdentity
from keepstep_sidecar.volume.files import aligned_buffer
from keepstep_sidecar.volume.run_tree import ShardName

_MOST_BUFFERS = 8
_BUFFER_WAIT_S = 30.0
_SHARD = r"(?:rank|base)-\d{1,9}-of-\d{1,9}\.safetensors"
_PATH = re.compile(rf"(/v1/\w+)(?:/([^/]+)/({_SHARD})(?:/(\d{{1,9}}|seal))?)?", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_LARGEST_MANIFEST: Final = MAX_HEADER_BYTES + (64 << 20)
_PIECE_BYTES: Final = 1 << 20
"""A body takes memory as it arrives, not as it is announced. Bodies larger than this (a manifest of
a terabyte, or a very long list) are read one at a time."""

_STATUS: Final = {UsageError: 400, NoSpaceError: 507, StorageError: 404, ImageError: 422}


class RequestBuffers:
    """Aligned memory of one chunk for each request. There may be many connections, so the number of
    buffers is bounded. Idle buffers are kept, because new memory costs as much as TLS."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(_MOST_BUFFERS)
        self._idle: deque[mmap] = deque()

    @contextmanager
    def borrow_buffer(self) -> Iterator[memoryview]:
        """A buffer of its own for a request. Raises NoSpaceError when none becomes free in time."""
        if not self._places.acquire(timeout=_BUFFER_WAIT_S):
            raise NoSpaceError(f"{_MOST_BUFFERS} requests are being served here; try again")
        try:
            buffer = self._pop() or aligned_buffer(CHUNK_BYTES)
            with memoryview(buffer) as view:
                yield view
            self._idle.append(buffer)
        finally:
            self._places.release()

    def free_idle(self) -> None:
        """Free the idle buffers."""
        while (buffer := self._pop()) is not None:
            buffer.close()

    def _pop(self) -> mmap | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


@dataclass
class ServerContext:
    """What every request needs. `buffers` and `large` bound the memory of all requests together."""

    shards: ServedShards
    copies: KeptCopies
    buffers: RequestBuffers = field(default_factory=RequestBuffers)
    large: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(1))


class Handler(BaseHTTPRequestHandler):
    """One connection. `context` and `sender` are set before its first request is read."""

    protocol_version = "HTTP/1.1"
    timeout = 60.0
    context: ServerContext
    sender: PodIdentity

    # --- routes ------------------------------------------------------------------------------

    def do_GET(self) -> None:
        self._answered({protocol.SHARDS: self._get})

    def do_PUT(self) -> None:
        self._answered({protocol.COPIES: self._chunk, protocol.NEEDED: self._drop_superseded})

    def do_POST(self) -> None:
        self._answered({protocol.COPIES: self._post})

    def _answered(self, routes: dict[str, Callable[[re.Match[str]], None]]) -> None:
        """Send every error as a Problem and end the connection: its body may be half read."""
        match = _PATH.fullmatch(unquote(self.path))
        self._may_be_large = False
        try:
            if match is None or match[1] not in routes:
                raise UsageError(f"{self.command} {self.path}: unknown path")
            routes[match[1]](match)
        except KeepstepError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            self._refuse(status, type(error).__name__, str(error))
        except (TimeoutError, ConnectionError) as error:
            self.close_connection = True
            warn("peer.disconnected", peer=str(self.sender), error=str(error) or "timed out")
        except OSError as error:
            self._refuse(500, "StorageError", str(error))
        finally:
            self._release_large()

    def _release_large(self) -> None:
        if self._may_be_large:
            self._may_be_large = False
            self.context.large.release()

    def _get(self, match: re.Match[str]) -> None:
        if match[2] is None:
            self._answer(self.context.shards.listing())
            return
        name = _name(match)
        with self.context.shards.open(name) as reading:
            self._send_range(reading, *_range(self.headers.get("Range", ""), reading.size_bytes))

    def _post(self, match: re.Match[str]) -> None:
        name = _name(match)
        if match[4] == "seal":
            self._body(0)
            part = self.context.copies.get_incoming_copy(name)
            if part is None:
                self._sealed_before(name)
                return
            self._answer(protocol.SealedCopy(root=self.context.copies.seal(part)))
            return
        data = self._body(_LARGEST_MANIFEST)
        with memoryview(data) as view:
            part = self.context.copies.begin(name, view, whose=str(self.sender))
        if part is None:
            self._answer(protocol.MissingChunks(sealed=True))
            return
        self._release_large()  # others may read theirs while this copies
        for other in self.context.shards.find_similar_shards(name):
            self.context.copies.reuse_chunks_from(part, other)
        self._answer(protocol.MissingChunks(missing=part.missing))

    def _sealed_before(self, name: ShardName) -> None:
        root = self.context.copies.get_root_digest(name)
        if root is None:
            raise StorageError(f"no copy of step {name.id}, rank {name.rank} was begun here")
        self._answer(protocol.SealedCopy(root=root))

    def _chunk(self, match: re.Match[str]) -> None:
        name, copies = _name(match), self.context.copies
        if (part := copies.get_incoming_copy(name)) is None:
            raise StorageError(f"no copy of step {name.id}, rank {name.rank} was begun here")
        chunk = int(match[4]) if (match[4] or "").isdigit() else -1
        if chunk not in part.manifest.chunk_indices:
            raise UsageError(f"{self.path}: there is no such chunk")
        begin, end = part.manifest.bounds_of_chunk(chunk)
        if self._length() != end - begin:
            raise FormatError(f"{self._length()} bytes for a chunk of {end - begin}")
        with self.context.buffers.borrow_buffer() as whole, whole[: end - begin] as data:
            if receive_into(self.rfile, self.connection, data) < len(data):  # type: ignore[arg-type]
                raise ConnectionError("it ended within a chunk")
            copies.write_chunk(part, chunk, data, whose=str(self.sender))
        self._respond(204, b"")

    def _drop_superseded(self, match: re.Match[str]) -> None:
        request = _decode(self._body(protocol.LARGEST_NEEDED_BYTES), protocol.CopiesToKeep)
        self.context.copies.drop_superseded(request, sender=self.sender.node_rank)
        self._respond(204, b"")

    # --- bytes -------------------------------------------------------------------------------

    def _send_range(self, reading: OpenShard, begin: int, end: int) -> None:
        self.send_response(206)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{reading.size_bytes}")
        self.end_headers()
        first = begin // PAGE_BYTES * PAGE_BYTES
        try:
            with self.context.buffers.borrow_buffer() as buffer:
                for at in range(first, end, CHUNK_BYTES):
                    pages = min(CHUNK_BYTES, -(-(end - at) // PAGE_BYTES) * PAGE_BYTES)
                    with buffer[:pages] as data:
                        reading.read(data, at)
                        with data[max(begin - at, 0) : end - at] as asked:
                            self.wfile.write(asked)
        except (KeepstepError, OSError) as error:
            # The head is sent, so only a cut connection can report the error.
            self.close_connection = True
            warn(
                "peer.send_failed", path=str(reading.path), peer=str(self.sender), error=str(error)
            )

    def finish(self) -> None:
        """Also frees the idle buffers: after the last transfer they are of no use."""
        self.context.buffers.free_idle()
        with suppress(OSError):
            super().finish()

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise UsageError(f"{self.command} {self.path}: it needs a Content-Length")
        return int(text)

    def _body(self, limit: int) -> bytearray:
        if (length := self._length()) > limit:
            raise UsageError(f"{self.command} {self.path}: {length} bytes are too many")
        if length > _PIECE_BYTES and not self._may_be_large:
            if not self.context.large.acquire(timeout=_BUFFER_WAIT_S):
                raise NoSpaceError("another large request is being read here; try again")
            self._may_be_large = True
        data = bytearray()
        while len(data) < length:
            if not (piece := self.rfile.read(min(_PIECE_BYTES, length - len(data)))):
                raise ConnectionError("it ended within a body")
            data += piece
        return data

    # --- answers -----------------------------------------------------------------------------

    def _answer(self, value: Any) -> None:
        self._respond(200, msgspec.json.encode(value))

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.close_connection = True
        warn(
            "peer.request_refused",
            peer=str(self.sender),
            request=self.path,
            code=code,
            error=message,
        )
        with suppress(OSError):
            self._respond(status, msgspec.json.encode(Problem(code=code, message=message)))

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if body:
            self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if body:
            self.wfile.write(body)

    def log_message(self, text: str, *args: Any) -> None:
        """Logs nothing: what matters is in the journal."""

    def version_string(self) -> str:
        return "keepstep"


def _name(match: re.Match[str]) -> ShardName:
    try:
        return ShardName.parse(Path(match[2] or "") / match[3])
    except (ValueError, TypeError) as error:
        raise UsageError(f"not a shard: {match[0]}") from error


def _range(header: str, size: int) -> tuple[int, int]:
    """The range as `[begin, end)`; the whole shard without a header."""
    if not header:
        return 0, size
    if not (match := _RANGE.fullmatch(header)) or not int(match[1]) <= int(match[2]) < size:
        raise UsageError(f"{header!r}: not a range of a shard of {size} bytes")
    return int(match[1]), int(match[2]) + 1


def _decode(data: bytes | bytearray, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # a DecodeError, or not UTF-8, or too deep
        raise UsageError(f"not understood: {error}") from error
