"""Connections to another pod (`PeerConnection`, `PeerConnections`), in blocking code, and shards
read from there.

Bytes move from and to buffers without copies. A link connects at its first request, and again after
an error. `abort` may be called from any thread: the running call then ends at once with a
StorageError.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from keepstep.core.shard import Shard
from keepstep.errors import DigestError, FormatError, KeepstepError, NoSpaceError, StorageError
from keepstep.steps import Tier
from keepstep.wire.trainer import Problem
from keepstep_sidecar.concurrency import run_blocking
from keepstep_sidecar.config.sidecar import split_address
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.peer import protocol
from keepstep_sidecar.tiers.peer.protocol import PodShardListing, receive_into
from keepstep_sidecar.tiers.peer.tls import (
    PodIdentity,
    TlsContextSource,
    explain_tls_error,
    identity_of_peer,
)
from keepstep_sidecar.tiers.source import Read, ReadCancellation, ShardSource
from keepstep_sidecar.volume.run_tree import ShardName

T = TypeVar("T")

_THREADS = 16
CONNECT_S = 5.0
QUIET_S = 30.0
"""A peer that sends nothing for this long counts as unreachable."""
_SLOWEST_BYTES_PER_S = 100 << 20
"""The least speed expected of a receiver that reads what its predecessor left."""


Expected = int | str | None
"""Who must answer: the pod of this node rank, the agent of this node, or any pod of the run."""


def peer_text(expected: Expected, address: str) -> str:
    """A name for people."""
    if expected is None:
        return address
    what = f"node rank {expected}" if isinstance(expected, int) else f"the agent of node {expected}"
    return f"{what} ({address})"


class PeerRefusal(StorageError):
    """The other pod refused; `code` as in its Problem."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class PeerConnection:
    """A connection to `address`. `identity`: the pod there; None until it has answered."""

    def __init__(
        self, address: str, credentials: TlsContextSource, *, expected: Expected = None
    ) -> None:
        self.address = address
        self.identity: PodIdentity | None = None
        self._credentials = credentials
        self._expected = expected
        self._remedy = ""
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = threading.Event()

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """A name for people."""
        known = self._expected if self.identity is None else self.identity.node_rank
        expected = known if isinstance(self._expected, int | None) else self._expected
        return peer_text(expected, self.address)

    # --- requests; all raise StorageError ----------------------------------------------------

    def listing(self) -> protocol.PodShardListing:
        """All that the pod holds."""
        return self._ask("GET", protocol.SHARDS, kind=protocol.PodShardListing)

    def begin(self, name: ShardName, manifest: bytes, *, size: int) -> protocol.MissingChunks:
        """Begin a copy of `size` bytes, or continue it."""
        path = _path(protocol.COPIES, name)
        quiet_s = QUIET_S + size / _SLOWEST_BYTES_PER_S
        return self._ask("POST", path, manifest, kind=protocol.MissingChunks, quiet_s=quiet_s)

    def send_chunk(self, name: ShardName, chunk: int, data: memoryview) -> None:
        """Send one chunk of a copy."""
        self._ask("PUT", f"{_path(protocol.COPIES, name)}/{chunk}", data, kind=None)

    def seal(self, name: ShardName, *, size: int) -> protocol.SealedCopy:
        """Make the copy durable. All chunks must be there, and so must the base of the shard."""
        path = f"{_path(protocol.COPIES, name)}/seal"
        quiet_s = QUIET_S + size / _SLOWEST_BYTES_PER_S
        return self._ask("POST", path, b"", kind=protocol.SealedCopy, quiet_s=quiet_s)

    def send_copies_to_keep(self, request: protocol.CopiesToKeep) -> None:
        """Tell the pod which copies to keep."""
        self._ask("PUT", protocol.NEEDED, msgspec.json.encode(request), kind=None)

    @contextlib.contextmanager
    def read_range(
        self, name: ShardName, begin: int, end: int
    ) -> Iterator[Callable[[memoryview], None]]:
        """Read bytes `[begin, end)` of a shard. Yields a function that fills a buffer. Call it, in
        order, with buffers that together have exactly that size."""
        path = _path(protocol.SHARDS, name)
        with self._translated():
            self._send("GET", path, b"", {"Range": f"bytes={begin}-{end - 1}"}, QUIET_S)
            response = self._response((206,))
            secure = self._connection.sock if self._connection is not None else None
            if secure is None:
                raise http.client.HTTPException("it closes the connection before the body")
            yield lambda into: _fill(response, secure, into)
            if response.read(1):
                raise http.client.HTTPException("more bytes than were asked for")

    # --- connection --------------------------------------------------------------------------

    def abort(self) -> None:
        """End the running call and refuse later ones."""
        self._aborted.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent; the next request connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        *,
        kind: type[T] | None,
        quiet_s: float = QUIET_S,
    ) -> T:
        with self._translated():
            self._send(method, path, body, {}, quiet_s)
            response = self._response((200, 204))
            data = response.read(protocol.LARGEST_JSON_BYTES)
            if response.read(1):
                raise http.client.HTTPException("its answer is too long")
            return msgspec.json.decode(data, type=kind) if kind is not None else None  # type: ignore[return-value]

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | memoryview,
        headers: Mapping[str, str],
        quiet_s: float,
    ) -> None:
        connection = self._connected()
        connection.sock.settimeout(quiet_s)
        connection.request(method, path, body=body, headers=headers)

    def _connected(self) -> http.client.HTTPConnection:
        if self._aborted.is_set():
            raise ConnectionAbortedError("given up")
        if self._connection is None:
            connection = http.client.HTTPConnection(*split_address(self.address))
            connection.sock = self._secured()
            self._connection = connection
        if self._aborted.is_set():  # set while we connected: no other thread ends what follows
            raise ConnectionAbortedError("given up")
        return self._connection

    def _secured(self) -> ssl.SSLSocket:
        tls = self._credentials.current()
        self._remedy = tls.remedy
        plain = socket.create_connection(split_address(self.address), timeout=CONNECT_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secure = tls.client.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        try:
            self.identity = self._checked(
                identity_of_peer(secure.getpeercert(), whose=self.address), tls
            )
        except BaseException:
            secure.close()
            raise
        return secure

    def _checked(self, who: PodIdentity, tls: Any) -> PodIdentity:
        if isinstance(self._expected, str):
            if who != PodIdentity.for_agent_of_node(self._expected):
                raise StorageError(
                    f"{self.address} is {who}, not the agent of node {self._expected}"
                )
            return who
        if not who.shares_run(tls.identity):
            raise StorageError(f"{self.address} is {who}, not of this run ({tls.identity})")
        if self._expected not in (None, who.node_rank):
            raise StorageError(f"{self.address} is {who}, not node rank {self._expected}")
        return who

    def _response(self, statuses: tuple[int, ...]) -> http.client.HTTPResponse:
        assert self._connection is not None
        response = self._connection.getresponse()
        if response.status in statuses:
            return response
        data = response.read(1 << 16)
        try:
            problem = msgspec.json.decode(data, type=Problem)
        except (ValueError, RecursionError):
            problem = Problem(code="internal", message=f"status {response.status}")
        message = f"{self.name} refused: {problem.message}"
        if problem.code == "NoSpaceError":
            raise NoSpaceError(message)
        raise PeerRefusal(message, code=problem.code)

    def _last_words(self) -> ssl.SSLError | None:
        """The alert of a peer that has closed the connection. With TLS 1.3 the peer checks our
        certificate after our side of the handshake is over, so a request may first meet a closed
        connection."""
        connection = self._connection
        if connection is None or connection.sock is None:
            return None
        try:
            connection.sock.settimeout(1.0)
            connection.sock.recv(1)
        except ssl.SSLError as error:
            return error if error.reason and "ALERT" in error.reason else None
        except (OSError, ValueError):
            pass
        return None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Any error ends the connection, and becomes a StorageError that names the peer (a
        DigestError or FormatError stays)."""
        try:
            yield
        except (DigestError, FormatError):
            self.close()
            raise
        except StorageError:
            self.close()
            raise
        except (ssl.SSLError, ConnectionError) as error:
            why = self._last_words() or error
            self.close()
            raise StorageError(f"{self.name}: {explain_tls_error(why, self._remedy)}") from error
        except TimeoutError as error:
            self.close()
            raise StorageError(f"{self.name} does not answer") from error
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            self.close()
            text = str(error) or type(error).__name__
            raise StorageError(f"{self.name}: {text}") from error
        except BaseException:
            self.close()
            raise


def _path(what: str, name: ShardName) -> str:
    return f"{what}/{name.id}/{name.file}"


def _fill(response: http.client.HTTPResponse, secure: socket.socket, into: memoryview) -> None:
    """Fill `into` from the body."""
    left = response.length or 0
    if len(into) > left:
        raise http.client.HTTPException(f"a body that ends {len(into) - left} bytes too early")
    if (done := receive_into(response.fp, secure, into)) < len(into):
        raise http.client.HTTPException(f"it ended {len(into) - done} bytes too early")
    response.length = left - done


# --- several at once -------------------------------------------------------------------------


class PeerConnections:
    """Connections to one pod that threads take and give back. `cancel` aborts them all."""

    def __init__(
        self,
        address: str,
        credentials: TlsContextSource,
        cancel: ReadCancellation,
        *,
        expected: Expected = None,
    ) -> None:
        self._make: Callable[[], PeerConnection] = functools.partial(
            PeerConnection, address, credentials, expected=expected
        )
        self._cancel = cancel
        self._idle: list[PeerConnection] = []
        self._all: list[PeerConnection] = []
        self._lock = threading.Lock()

    def __enter__(self) -> PeerConnections:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            for link in self._all:
                link.close()

    def ask(self, question: Callable[[PeerConnection], T]) -> T:
        """The answer of the pod to one question."""
        with self.borrow_connection() as link:
            return question(link)

    @contextmanager
    def borrow_connection(self) -> Iterator[PeerConnection]:
        """A connection that no other thread uses meanwhile."""
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is None:
            link = self._make()
            with self._lock:
                self._all.append(link)
            self._cancel.add(link.abort)
        try:
            yield link
        finally:
            with self._lock:
                self._idle.append(link)


class PeerCalls:
    """Blocking conversations with other pods, for the event loop. Owns the threads that talk."""

    def __init__(self, credentials: TlsContextSource) -> None:
        self.credentials = credentials
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="peer")

    async def run_on_thread(
        self, work: Callable[[PeerConnections], T], address: str, *, expected: Expected = None
    ) -> T:
        """Run `work(links)` on a thread. When this is cancelled, the links are aborted. It ends
        only after `work` has."""

        def talk(cancel: ReadCancellation) -> T:
            with PeerConnections(address, self.credentials, cancel, expected=expected) as links:
                return work(links)

        return await verified_chunks.run_cancellable(self._threads, talk)

    async def run_blocking_file_work(self, work: Callable[[], T]) -> T:
        """Run `work()` on a thread, for files of this machine."""
        return await run_blocking(self._threads, work)

    def close(self) -> None:
        """Accept no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# --- a shard at another pod ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeerSource(ShardSource):
    """See `ShardSource`. `name`: of the shard there. `expected`: who must answer. `received`:
    called with the bytes and seconds of a read. A read takes enough chunks that the round trip of
    a request does not matter."""

    address: str
    name: ShardName
    expected: Expected
    credentials: TlsContextSource = field(compare=False, repr=False)
    received: Callable[[int, float], None] = field(compare=False, repr=False)
    streams: int = protocol.STREAMS
    tier: Tier = Tier.PEER
    chunks_per_read: int = 4

    @classmethod
    def from_address(
        cls, address: str, shard: Shard, *, expected: Expected, **more: Any
    ) -> PeerSource:
        """The shard at this pod. `more`: the other fields."""
        name = ShardName.of(shard)
        where = f"step {name.id}, rank {name.rank} from {peer_text(expected, address)}"
        at = cls(shard=shard, where=where, address=address, expected=expected, name=name, **more)
        if shard.base is None:
            return at
        base = replace(
            at, shard=shard.base, where=f"the base of {where}", name=name.base_shard_name
        )
        return replace(at, beside=base)

    @contextmanager
    def opened(self, cancel: ReadCancellation) -> Iterator[Read]:
        began, sizes = time.monotonic(), [0]
        with PeerConnections(
            self.address, self.credentials, cancel, expected=self.expected
        ) as links:

            def read(begin: int, into: Sequence[memoryview]) -> Iterator[memoryview]:
                end = begin + sum(map(len, into))
                with (
                    links.borrow_connection() as link,
                    link.read_range(self.name, begin, end) as fill,
                ):
                    for view in into:
                        fill(view)
                        yield view
                sizes.append(end - begin)

            yield read
        self.received(sum(sizes), time.monotonic() - began)


# --- for a command --------------------------------------------------------------------------------


_LIST_TIMEOUT_S = 10.0


async def list_peer(
    addresses: Sequence[str], credentials: TlsContextSource, *, run: str
) -> tuple[list[PeerSource], tuple[str, ...]]:
    """All that the peers hold, and which of them do not answer and why."""
    calls = PeerCalls(credentials)
    found: list[PeerSource] = []
    silent: list[str] = []

    async def ask(address: str) -> None:
        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S):
                listing = await calls.run_on_thread(_listing, address)
        except (KeepstepError, TimeoutError) as error:
            silent.append(f"{address} ({error or 'no answer in time'})")
            return
        found.extend(
            PeerSource.from_address(
                address,
                Shard(**shard.base_fields),
                expected=None,
                run=run,
                credentials=credentials,
                received=lambda size_bytes, seconds: None,
            )
            for shard in listing.shards
        )

    try:
        await asyncio.gather(*map(ask, addresses))
    finally:
        calls.close()
    return found, tuple(silent)


def _listing(links: PeerConnections) -> PodShardListing:
    with links.borrow_connection() as link:
        return link.listing()
