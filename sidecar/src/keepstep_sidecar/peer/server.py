"""Listens for other pods: mutual TLS first, then who it is, then what it wants.

A thread a connection, at most a few dozen. Whoever shows no certificate of the run's authority, or
one that has ended, fails the handshake; whoever belongs to another run is told so.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from keepstep.errors import KeepstepError, StorageError, UsageError
from keepstep.protocol import Problem
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.peer.credentials import Credentials
from keepstep_sidecar.peer.handling import Desk, Handler
from keepstep_sidecar.peer.identity import Identity, of_peer
from keepstep_sidecar.peer.settings import split

_HANDSHAKE_S = 10.0
_MOST_CONNECTIONS = 64
_PAUSE_S = 0.2
"""After a connection could not be accepted, for lack of descriptors above all."""


class Server:
    """Serves from `start` to `stop`."""

    def __init__(self, listen: str, credentials: Credentials, desk: Desk) -> None:
        """Binds the address. Raises StorageError when that is not possible."""
        self._credentials = credentials
        self._desk = desk
        self._open: set[socket.socket] = set()
        self._taken = 0  # connections, also those that are no further than the handshake
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._stopping = False
        host, port = split(listen)
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
            )
        except OSError as error:
            raise StorageError(f"--peer-listen {listen}: cannot listen: {error}") from error
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        """Take connections, on a thread. Idempotent."""
        if self._threads:
            return
        self._spawn(self._accept, name="peer-accept")
        say("serving peers", port=self.port)

    def stop(self) -> None:
        """Close all connections and wait for their threads."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
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
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._threads.discard(thread)
            raise

    def _accept(self) -> None:
        while not self._stopping:
            try:
                plain, address = self._socket.accept()
            except OSError as error:
                if not self._stopping:
                    warn("peers not served", reason=str(error))
                    time.sleep(_PAUSE_S)
                    continue
                return
            self._take(plain, address)

    def _take(self, plain: socket.socket, address: tuple[Any, ...]) -> None:
        """Serve this connection, if it is not one too many."""
        with self._lock:
            if self._taken >= _MOST_CONNECTIONS:
                plain.close()
                return
            self._taken += 1
        try:
            self._spawn(self._serve, plain, address, name=f"peer {address[0]}")
        except RuntimeError as error:  # no thread is to be had
            warn("peer not served", address=str(address[0]), reason=str(error))
            plain.close()
            with self._lock:
                self._taken -= 1

    def _serve(self, plain: socket.socket, address: tuple[Any, ...]) -> None:
        where = f"{address[0]}:{address[1]}"
        try:
            with self._secured(plain) as secure, self._tracked(secure):
                self._talk(secure, where)
        except (OSError, KeepstepError) as error:
            if not self._stopping:
                warn("peer refused", address=where, reason=_why(error))
        finally:
            plain.close()
            with self._lock:
                self._taken -= 1

    def _secured(self, plain: socket.socket) -> ssl.SSLSocket:
        plain.settimeout(_HANDSHAKE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._credentials.current().server.wrap_socket(plain, server_side=True)

    @contextlib.contextmanager
    def _tracked(self, secure: ssl.SSLSocket) -> Any:
        with self._lock:
            self._open.add(secure)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(secure)

    def _talk(self, secure: ssl.SSLSocket, where: str) -> None:
        try:
            sender = self._admitted(of_peer(secure.getpeercert(), whose=where), where)
        except UsageError as error:
            _refuse(secure, str(error))
            raise
        handler = type("_", (Handler,), {"desk": self._desk, "sender": sender})
        handler(secure, where, self)

    def _admitted(self, sender: Identity, where: str) -> Identity:
        own = self._credentials.current().identity
        if not sender.shares_run(own):
            raise UsageError(
                f"{where} is {sender}; here is {own}, and pods of other runs are not served"
            )
        return sender


def _refuse(secure: ssl.SSLSocket, message: str) -> None:
    """Read what was asked, then say no: a client that is still sending would miss the answer."""
    with contextlib.suppress(OSError):
        secure.recv(1 << 16)
        body = msgspec.json.encode(Problem(code="ForeignError", message=message))
        head = f"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        secure.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        secure.unwrap()


def _why(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    return str(error) or type(error).__name__
