"""How errors leave the sidecar: an HTTP status and a `wire.trainer.Problem` with a stable code."""

from __future__ import annotations

from keepstep.errors import (
    ImageError,
    KeepstepError,
    NoMemoryError,
    ProtocolError,
    SidecarError,
    StorageError,
)
from keepstep.wire.trainer import Problem

STATUS = {
    "absent": 404,
    "bad-image": 422,
    "bad-request": 400,
    "internal": 500,
    "memory-busy": 503,
    "no-lease": 410,
    "no-memory": 507,
    "no-slot": 507,
    "not-verified": 409,
    "pins": 409,
    "protocol": 426,
    "rank-of-parent": 409,
    "rank-taken": 409,
    "run-taken": 409,
    "stale-slot": 409,
    "starting": 503,
    "stopping": 503,
    "storage": 507,
    "unknown-layout": 409,
    "unknown-step": 404,
}
"""All codes, with their HTTP status. docs/protocol.md says what a trainer does at each."""


def refusal_error(code: str, message: str) -> SidecarError:
    """An error to be sent with this code, which must be in `STATUS`."""
    assert code in STATUS, code
    return SidecarError(message, code=code)


def problem_of(error: KeepstepError) -> tuple[int, Problem]:
    """The HTTP status and the problem that describe `error`."""
    code = _code(error)
    return STATUS.get(code, 500), Problem(code=code, message=str(error))


def _code(error: KeepstepError) -> str:
    if isinstance(error, NoMemoryError):
        return "no-memory"
    if isinstance(error, ProtocolError):
        return "protocol"
    if isinstance(error, SidecarError):
        return error.code
    if isinstance(error, StorageError):
        return "storage"
    return "bad-image" if isinstance(error, ImageError) else "internal"
