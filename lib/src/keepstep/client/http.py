"""Calls to the sidecar: HTTP/1.1 + JSON over its unix socket, with the standard library only.

A `Client` makes one call at a time on a connection that it keeps. A `Lease` is one response that
never ends. The kernel closes it when this process dies in any way, and so the sidecar learns of the
death. A forked child must not keep the descriptor: otherwise a data loader's worker would hold the
lease of its dead parent.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from keepstep.client.wakeups import Gate
from keepstep.errors import NoMemoryError, ProtocolError, SidecarAbsent, SidecarError
from keepstep.wire.trainer import (
    LeaseGranted,
    LeaseNews,
    LeaseRequest,
    Problem,
    from_json,
    to_json,
)

T = TypeVar("T")

_ERRORS: dict[str, type[SidecarError]] = {"protocol": ProtocolError, "no-memory": NoMemoryError}


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the unix socket at `path`. Raises SidecarAbsent if no sidecar listens there."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError as error:
            self.sock.close()
            raise SidecarAbsent(
                f"no sidecar listens on {self._path} ({error.strerror or error}); start the"
                " training with `keepstep run -- ...`, or unset KEEPSTEP_SOCKET to train without",
                code="absent",
            ) from error

    def ask(self, route: str, message: Any) -> http.client.HTTPResponse:
        """POST a message, or GET if there is none. Raises the problem that the answer reports, as a
        SidecarError."""
        method, body = ("GET", None) if message is None else ("POST", to_json(message))
        self.request(method, route, body, {"Content-Type": "application/json"})
        response = self.getresponse()
        if response.status != 200:
            raise _problem(response.status, response.read())
        return response

    def absent(self, error: Exception) -> SidecarAbsent:
        """The SidecarAbsent to raise for a connection that broke with `error`."""
        silent = isinstance(error, TimeoutError)
        kind = "did not answer in time" if silent else "went away"
        code = "silent" if silent else "absent"
        return SidecarAbsent(f"the sidecar on {self._path} {kind} ({error})", code=code)


def _problem(status: int, data: bytes) -> SidecarError:
    try:
        problem = from_json(Problem, data)
    except ProtocolError:
        text = data[:200].decode(errors="replace")
        return ProtocolError(f"the sidecar answered {status}: {text}", code="protocol")
    return _ERRORS.get(problem.code, SidecarError)(problem.message, code=problem.code)


class Client:
    """One connection to the sidecar, for one thread at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._connection: UnixConnection | None = None
        self._ended = False

    def call(self, route: str, message: Any, kind: type[T], *, timeout_s: float = 10.0) -> T:
        """POST `message` to `route` and decode the answer.

        Raises SidecarAbsent, ProtocolError, NoMemoryError or SidecarError (with the problem's
        code). If a kept connection breaks, the call is repeated once on a new one, because the
        sidecar may have restarted. Every route is idempotent.
        """
        while True:
            if self._ended:
                raise SidecarAbsent("the connection to the sidecar was closed", code="absent")
            kept = self._connection
            connection = self._connection = kept or UnixConnection(self.path, timeout_s)
            try:
                connection.timeout = timeout_s
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                return from_json(kind, connection.ask(route, message).read())
            except (http.client.HTTPException, OSError) as error:
                self.close()
                if kept is None or isinstance(error, TimeoutError):
                    raise connection.absent(error) from error

    def get(self, route: str, kind: type[T], *, timeout_s: float = 10.0) -> T:
        """GET `route` and decode the answer. Raises as `call` does."""
        return self.call(route, None, kind, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def end(self) -> None:
        """Allow no more calls. May be called from any thread: a thread that waits for an answer
        stops waiting."""
        self._ended = True
        # Read once, because the thread that uses the connection may close it meanwhile.
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Lease:
    """The lease, held for the life of this process. `lost` is set once the sidecar is gone or the
    lease was closed."""

    def __init__(
        self,
        path: str,
        request: LeaseRequest,
        on_lost: Callable[[], None],
        *,
        warn: Callable[[str], None] = lambda text: None,
        timeout_s: float = 10.0,
    ) -> None:
        """Ask for the lease. `warn` gets what the sidecar has to tell this rank's user, from
        another thread. Raises as `Client.call` does, with code `rank-taken` if another live trainer
        holds this rank."""
        self.lost = Gate()
        self._on_lost = on_lost
        self._warn = warn
        connection = self._connection = UnixConnection(path, timeout_s)
        try:
            self._response = connection.ask("/v1/lease", request)
            self.granted = from_json(LeaseGranted, self._response.readline())
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise connection.absent(error) from error
        except SidecarError:
            connection.close()
            raise
        connection.sock.settimeout(None)
        _LEASES.add(self)
        threading.Thread(target=self._watch, name="keepstep-lease", daemon=True).start()

    def close(self) -> None:
        """Give the rank back."""
        _LEASES.discard(self)
        sock = self._connection.sock
        if sock is not None:
            # shutdown, not close: the watching thread is reading from this descriptor.
            with contextlib.suppress(OSError):  # the sidecar closed it first
                sock.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            while line := self._response.readline():
                self._read(line)
        _LEASES.discard(self)
        self._connection.close()
        self.lost.set()
        self._on_lost()

    def _read(self, line: bytes) -> None:
        with contextlib.suppress(ProtocolError):  # a line of a newer sidecar
            if warning := from_json(LeaseNews, line).warning:
                self._warn(warning)


_LEASES: weakref.WeakSet[Lease] = weakref.WeakSet()


def _forget_leases_in_child() -> None:
    for lease in list(_LEASES):
        sock = lease._connection.sock
        if sock is not None and (fd := sock.detach()) >= 0:
            # Detached, because another file may soon have this number, and the socket object must
            # not close that file.
            os.close(fd)
    _LEASES.clear()


os.register_at_fork(after_in_child=_forget_leases_in_child)
