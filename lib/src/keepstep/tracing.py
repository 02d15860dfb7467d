"""OpenTelemetry spans of saves and restores, where the program itself has imported OpenTelemetry.

A span is handed to a thread of its own, and dropped when that one is behind: whatever a processor
or an exporter does, training does not wait for it and sees none of its errors.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
from typing import Any, Final, NamedTuple

from keepstep.version import __version__

MODULE: Final = "opentelemetry.trace"
_MOST: Final = 256


class _Span(NamedTuple):
    """Times in nanoseconds since 1970. `context`: of the caller, whose span is the parent."""

    name: str
    began: int
    ended: int
    attributes: dict[str, str | int]
    context: Any


def record_span(name: str, seconds: float, **attributes: str | int) -> None:
    """Make a span that took `seconds` and ends now; names of `attributes` get `keepstep.` before
    them. Does nothing where OpenTelemetry is not imported. Never waits or raises."""
    if MODULE not in sys.modules:
        return
    with contextlib.suppress(Exception):
        now = time.time_ns()
        named = {f"keepstep.{key}": value for key, value in attributes.items()}
        context = sys.modules["opentelemetry.context"].get_current()
        span = _Span(name, now - round(seconds * 1e9), now, named, context)
        _queue().put_nowait(span)


@functools.cache
def _queue() -> queue.Queue[_Span]:
    """The spans that wait, and the thread that hands them over."""
    waiting: queue.Queue[_Span] = queue.Queue(_MOST)
    threading.Thread(target=_hand_over, args=(waiting,), name="spans", daemon=True).start()
    return waiting


def _hand_over(waiting: queue.Queue[_Span]) -> None:
    while True:
        span = waiting.get()
        with contextlib.suppress(Exception):
            sys.modules[MODULE].get_tracer("keepstep", __version__).start_span(
                span.name, context=span.context, start_time=span.began, attributes=span.attributes
            ).end(end_time=span.ended)
