"""Single calls to a run's sidecar.

A run often has no sidecar, so most calls report that by their result instead of an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from keepstep.client.session import SidecarClient
from keepstep.errors import SidecarAbsent
from keepstep.steps import StepId
from keepstep.wire.status import HistoryPage, Status
from keepstep.wire.trainer import (
    Flushed,
    FlushRequest,
    PinnedStepsReply,
    PinRequest,
    RegisterOwnerRequest,
    StopSidecarRequest,
)

T = TypeVar("T")

ANSWER_S = 10.0
"""A live sidecar answers a question about itself in much less time."""


def ask_status(path: Path) -> Status | None:
    """The status of the sidecar; None when no process listens on `path`.

    Raises SidecarError when a process listens but its answer is malformed or late.
    """
    return _ask(path, lambda client: client.get("/v1/status", Status, timeout_s=ANSWER_S))


def ask_history(path: Path, since: int) -> HistoryPage | None:
    """What happened after the event `since`; None when no process listens. Raises SidecarError."""
    route = f"/v1/history?since={since}"
    return _ask(path, lambda client: client.get(route, HistoryPage, timeout_s=ANSWER_S))


def ask_flush(path: Path, *, timeout_s: float) -> Flushed | None:
    """Make the newest two common staged steps durable; None when no process listens.

    Raises SidecarError.
    """
    return _call(path, "/v1/flush", FlushRequest(timeout_s=timeout_s), Flushed, timeout_s)


def register_owner_process(path: Path, pid: int) -> None:
    """Tell the sidecar not to end by itself while process `pid` lives. Raises SidecarError."""
    _call(path, "/v1/owner", RegisterOwnerRequest(pid=pid), dict)


def ask_pin(path: Path, step_id: StepId, *, pinned: bool) -> PinnedStepsReply | None:
    """Pin or unpin a step; None when no process listens. Raises SidecarError."""
    return _call(path, "/v1/pin", PinRequest(id=step_id, pinned=pinned), PinnedStepsReply)


def ask_stop(path: Path, *, forget: bool, timeout_s: float, drain: bool = True) -> bool:
    """Ask the sidecar to make its newest steps durable (`drain`) and to end; `forget` frees its
    memory.

    Returns False when no process listens. The sidecar may end a moment after its answer. Raises
    SidecarError.
    """
    request = StopSidecarRequest(drain=drain, forget=forget, timeout_s=timeout_s)
    return _call(path, "/v1/stop", request, dict, timeout_s) is not None


def _call(path: Path, route: str, request: Any, kind: type[T], work_s: float = 0.0) -> T | None:
    timeout_s = work_s + ANSWER_S
    return _ask(path, lambda client: client.call(route, request, kind, timeout_s=timeout_s))


def _ask(path: Path, question: Callable[[SidecarClient], T]) -> T | None:
    """The answer; None when no process listens. Raises SidecarError."""
    client = SidecarClient(str(path))
    try:
        return question(client)
    except SidecarAbsent as error:
        if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            return None
        raise  # a process listens
    finally:
        client.close()
