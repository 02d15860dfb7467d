"""Calls of the command to a run's sidecar. Absent is an answer here, not an accident.

The trainer's `keepstep.client.http` keeps a connection and treats an absent sidecar as an error;
these are single questions, among them GETs, to a sidecar that is often rightly gone.
"""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

from keepstep.errors import ProtocolError, SidecarError
from keepstep.wire.status import Status
from keepstep.wire.trainer import (
    Flushed,
    FlushRequest,
    OwnerRequest,
    Problem,
    StopRequest,
    from_json,
    to_json,
)

ANSWER_S = 10.0
"""A live sidecar answers a question about itself well within this."""


def status(path: Path, *, timeout_s: float = ANSWER_S) -> Status | None:
    """What the sidecar says of itself; None when nobody listens on `path`.

    Raises SidecarError when somebody does, but answers nonsense or not in time.
    """
    answer = _request(path, "GET", "/v1/status", timeout_s=timeout_s)
    return None if answer is None else from_json(Status, answer)


def answers(path: Path, *, timeout_s: float = 2.0) -> bool:
    """Whether a sidecar is up on `path`, be it well or not."""
    return health(path, timeout_s=timeout_s) is not None


def health(path: Path, *, timeout_s: float = 2.0) -> str | None:
    """What keeps the sidecar on `path` from its work, "" for nothing; None when none answers."""
    try:
        answer = _ask(path, "GET", "/healthz", timeout_s=timeout_s)
    except SidecarError:
        return None
    if answer is None:
        return None
    status, text = answer
    return "" if status == 200 else text.decode(errors="replace").strip()


def flush(path: Path, *, timeout_s: float) -> Flushed | None:
    """Make the newest two common staged steps durable; None when nobody listens.

    Raises SidecarError.
    """
    body = to_json(FlushRequest(timeout_s=timeout_s))
    answer = _request(path, "POST", "/v1/flush", body, timeout_s=timeout_s + ANSWER_S)
    return None if answer is None else from_json(Flushed, answer)


def own(path: Path, pid: int) -> None:
    """The sidecar does not end by itself while process `pid` lives. Raises SidecarError."""
    body = to_json(OwnerRequest(pid=pid))
    _request(path, "POST", "/v1/owner", body, timeout_s=ANSWER_S)


def stop(path: Path, *, forget: bool, timeout_s: float, drain: bool = True) -> bool:
    """Ask the sidecar to make its newest steps durable (`drain`) and end; `forget` frees its
    memory.

    False when nobody listens. It may end a moment after it has answered. Raises SidecarError.
    """
    body = to_json(StopRequest(drain=drain, forget=forget, timeout_s=timeout_s))
    return _request(path, "POST", "/v1/stop", body, timeout_s=timeout_s + ANSWER_S) is not None


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _request(
    path: Path, method: str, route: str, body: bytes | None = None, *, timeout_s: float
) -> bytes | None:
    answer = _ask(path, method, route, body, timeout_s=timeout_s)
    if answer is None:
        return None
    status, data = answer
    if status != 200:
        raise _refusal(route, status, data)
    return data


def _ask(
    path: Path, method: str, route: str, body: bytes | None = None, *, timeout_s: float
) -> tuple[int, bytes] | None:
    """Status and body of the answer; None when nobody listens. Raises SidecarError."""
    connection = _Connection(path, timeout_s)
    try:
        connection.connect()
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise SidecarError(f"cannot reach the sidecar on {path}: {error}", code="absent") from error
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, route, body, headers)
        response = connection.getresponse()
        data = response.read()
    except (http.client.HTTPException, OSError) as error:
        raise SidecarError(
            f"the sidecar on {path} did not answer {route} ({error or type(error).__name__})",
            code="absent",
        ) from error
    finally:
        connection.close()
    return response.status, data


def _refusal(route: str, status: int, data: bytes) -> SidecarError:
    try:
        problem = from_json(Problem, data)
    except ProtocolError:
        text = data[:200].decode(errors="replace")
        return ProtocolError(f"{route}: the sidecar answered {status}: {text}", code="protocol")
    return SidecarError(problem.message, code=problem.code)
