"""Tells the sidecar of the error that ends this process, and whether the next start repeats it.

`keepstep run --restarts` and other supervisors need that: a new start helps against a lost peer or
the network, but not against an option that keepstep refuses, a checkpoint of another model, or a
module that is not installed. Needs no lease, because many of these errors come before there is one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

from keepstep.errors import FormatError, MismatchError, UsageError, VersionError

_REPEATED = (UsageError, MismatchError, FormatError, VersionError, ImportError, SyntaxError)
_WITHIN_S = 2.0
_REASON = 4000  # characters


def watch_uncaught_errors(report: Callable[[BaseException], None]) -> None:
    """From now on, call `report_uncaught_error` with an uncaught error. The previous excepthook
    runs first."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        try:
            before(kind, error, at)
        finally:
            report(error)

    sys.excepthook = hook


def report_uncaught_error(error: BaseException) -> None:
    """Tell the sidecar of this error, if it is one of a script. Raises nothing."""
    path = os.environ.get("KEEPSTEP_SOCKET")
    if not path or not isinstance(error, Exception):
        return
    with contextlib.suppress(Exception):
        from keepstep.client.session import (
            SidecarClient,  # it would slow down every import of keepstep
        )
        from keepstep.wire.trainer import UncaughtRequest

        reason = f"{type(error).__name__}: {error}"[:_REASON]
        request = UncaughtRequest(reason=reason, pid=os.getpid(), repeats=would_recur(error))
        with contextlib.closing(SidecarClient(path)) as client:
            client.call("/v1/uncaught", request, dict, timeout_s=_WITHIN_S)


def would_recur(error: BaseException) -> bool:
    """Whether a new start ends in the same error, as long as no step was kept in between."""
    return any(isinstance(cause, _REPEATED) for cause in iter_error_chain(error, contexts=False))


def iter_error_chain(error: BaseException | None, *, contexts: bool) -> Iterator[BaseException]:
    """The error and its causes. `contexts`: also those that were being handled when it came."""
    known = set[int]()
    while error is not None and id(error) not in known:
        known.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)
