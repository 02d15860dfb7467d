"""Listens for other pods: first mutual TLS, then the pod's identity, then its requests.

Each connection has a thread; there are a few dozen at most. A client without a certificate of the
run's authority, or with an expired one, fails the handshake. One that is not served here is told
that it is refused. Until it is identified, a client is a stranger (see `connections`). Pods of the
run have places of their own that strangers cannot take. A client that asks for membership of the
run is handed over to its leader's hub, which needs no thread for it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from keepstep.errors import KeepstepError, StorageError, UsageError
from keepstep.wire.trainer import Problem
from keepstep_sidecar.config.sidecar import split_address
from keepstep_sidecar.log import RareWarning, info
from keepstep_sidecar.tiers.peer import member_frames
from keepstep_sidecar.tiers.peer.handlers import Handler, ServerContext
from keepstep_sidecar.tiers.peer.tls import (
    MEMBERSHIP,
    PodIdentity,
    TlsContextSource,
    explain_tls_error,
    identity_of_peer,
)
from keepstep_sidecar.unauthenticated_connections import (
    ACCEPT_PAUSE_S,
    FAILED_PAUSE_S,
    UnauthenticatedConnections,
)

_HANDSHAKE_S = 5.0
_MOST_STRANGERS, _MOST_OF_AN_ADDRESS = 64, 16
_MOST_PEERS = 128
_MOST_REFUSALS, _REFUSED_S = 16, 60.0
_BACKLOG = 1024
"""All members of a run may come at once, after their leader was away."""
_TOO_SLOW = "the client sent no request in time"
_PLACE_S = 0.05
_ACCEPT_S = 0.5
"""How long to wait for a connection before overdue connections are ended."""


Join = Callable[[ssl.SSLSocket, PodIdentity, str], None]
"""Takes over the connection of a member at an address; from any thread."""


class Server:
    """Serves from `start` to `stop`."""

    def __init__(
        self,
        listen: str,
        credentials: TlsContextSource,
        context_of: Callable[[PodIdentity], ServerContext],
        *,
        join: Join | None = None,
    ) -> None:
        """Binds the address. Raises StorageError when that is not possible. `context_of`: what is
        served to a client; raises UsageError or StorageError to refuse it. `join`: None unless this
        sidecar leads the run."""
        self._refusals: dict[str, tuple[float, str]] = {}
        self._join = join
        self._credentials = credentials
        self._context_of = context_of
        self._strangers = UnauthenticatedConnections(
            _cut, most=_MOST_STRANGERS, most_each=_MOST_OF_AN_ADDRESS, seconds=_HANDSHAKE_S
        )
        self._peers: set[socket.socket] = set()
        self._complain = RareWarning()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._stopping = False
        host, port = split_address(listen)
        try:
            self._socket = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise StorageError(f"--peer-listen {listen}: cannot listen: {error}") from error
        self._socket.settimeout(_ACCEPT_S)
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        """Accept connections, on a thread. Idempotent."""
        if self._threads:
            return
        self._spawn(self._accept, name="peer-accept")
        info("peer.server_started", port=self.port)

    def stop(self) -> None:
        """Close all connections and wait for their threads."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._strangers.end_all()
        with self._lock:
            for peer in self._peers:
                _cut(peer)
        for _ in ("those there are", "one that was accepted meanwhile"):
            with self._lock:
                threads = list(self._threads)
            for thread in threads:
                thread.join(timeout=_HANDSHAKE_S)

    def _spawn(self, work: Callable[..., None], *arguments: Any, name: str) -> None:
        def run() -> None:
            try:
                work(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:  # code that sees the thread in the set may join it
            thread.start()
            self._threads.add(thread)

    def _accept(self) -> None:
        while not self._stopping:
            self._strangers.end_overdue()
            self._await_place()
            try:
                plain, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._stopping:
                    self._complain("peer.accept_failed", error=str(error))
                    time.sleep(FAILED_PAUSE_S)
                continue
            self._take(plain, address)

    def _await_place(self) -> None:
        """All members of a run may shake hands at once: the next one waits for its place a moment,
        and costs none of them theirs. Strangers that hold their places cannot make it wait long."""
        deadline = time.monotonic() + _PLACE_S
        while self._strangers.full and time.monotonic() < deadline:
            time.sleep(ACCEPT_PAUSE_S / 2)

    def _take(self, plain: socket.socket, address: tuple[Any, ...]) -> None:
        """Begin to serve a connection, on a thread."""
        where = f"{address[0]}:{address[1]}"
        try:
            secure = self._secured(plain)
        except (OSError, KeepstepError) as error:  # it has gone, or there is no certificate yet
            plain.close()
            self._refused(where, error)
            return
        crowded = self._strangers.admit_with_eviction(secure, str(address[0]))
        try:
            self._spawn(self._serve, secure, where, name=f"peer {address[0]}")
        except RuntimeError as error:  # no thread can be started
            self._strangers.leave(secure)
            secure.close()
            self._complain("peer.connection_failed", address=where, error=str(error))
        if crowded:
            time.sleep(ACCEPT_PAUSE_S)

    def _serve(self, secure: ssl.SSLSocket, where: str) -> None:
        taken_over = False
        try:
            secure.do_handshake()
            taken_over = self._talk(secure, where)
        except (OSError, KeepstepError, ValueError) as error:  # ValueError: it was cut meanwhile
            self._refused(where, error)
        finally:
            self._strangers.leave(secure)
            if not taken_over:
                secure.close()

    def list_refused_hosts(self) -> dict[str, str]:
        """The hosts that were refused in the last minute and not served since, and why."""
        begin = time.monotonic() - _REFUSED_S
        with self._lock:
            return {host: why for host, (at, why) in self._refusals.items() if at > begin}

    def _refused(self, where: str, error: Exception) -> None:
        """Log each reason of a host once: clients come again and again."""
        if self._stopping:
            return
        host, reason = where.rpartition(":")[0], self._why(error)
        with self._lock:
            _, before = self._refusals.pop(host, (0.0, ""))
            self._refusals[host] = time.monotonic(), reason
            if len(self._refusals) > _MOST_REFUSALS:
                del self._refusals[next(iter(self._refusals))]
        if reason != before:
            self._complain("peer.connection_refused", address=where, error=reason)

    def _why(self, error: Exception) -> str:
        remedy = ""
        with contextlib.suppress(KeepstepError):
            remedy = self._credentials.current().remedy
        return explain_tls_error(error, remedy)

    def _secured(self, plain: socket.socket) -> ssl.SSLSocket:
        plain.settimeout(_HANDSHAKE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._credentials.current().server.wrap_socket(
            plain, server_side=True, do_handshake_on_connect=False
        )

    @contextlib.contextmanager
    def _admitted(self, secure: ssl.SSLSocket, where: str) -> Iterator[None]:
        """A place among the peers. Raises UsageError if there is none or the client was too
        slow."""
        if not self._strangers.leave(secure):
            raise UsageError(_TOO_SLOW)
        with self._lock:
            if len(self._peers) >= _MOST_PEERS:
                raise UsageError(f"{_MOST_PEERS} connections of other machines are open")
            self._peers.add(secure)
        try:
            yield
        finally:
            with self._lock:
                self._peers.discard(secure)

    def _talk(self, secure: ssl.SSLSocket, where: str) -> bool:
        """Returns whether the connection was taken over."""
        member = secure.selected_alpn_protocol() == MEMBERSHIP
        try:
            sender = identity_of_peer(secure.getpeercert(), whose=where)
            context = self._context_of(sender)
            if member and self._join is None:
                raise UsageError("this sidecar does not lead the run")
        except (UsageError, StorageError) as error:
            _refuse(secure, str(error), member=member)
            raise
        with self._lock:
            self._refusals.pop(where.rpartition(":")[0], None)
        if member and self._join is not None:
            if not self._strangers.leave(secure):
                raise UsageError(_TOO_SLOW)
            self._join(secure, sender, where)
            return True
        handler = type("_", (Handler,), {"context": context, "sender": sender})
        with self._admitted(secure, where):
            handler(secure, where, self)
        return False


def _cut(secure: socket.socket) -> None:
    """End the connection while another thread reads from it. `SSLSocket.shutdown` would take the
    TLS from that thread."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(secure, socket.SHUT_RDWR)


def _refuse(secure: ssl.SSLSocket, message: str, *, member: bool) -> None:
    """Read the request, then refuse it: a client that is still sending would miss the answer."""
    with contextlib.suppress(OSError):
        secure.recv(1 << 16)
        secure.sendall(member_frames.refusal_frame(message) if member else _forbidden(message))
        secure.unwrap()


def _forbidden(message: str) -> bytes:
    body = msgspec.json.encode(Problem(code="ForeignError", message=message))
    head = f"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body
