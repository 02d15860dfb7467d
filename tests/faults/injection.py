"""Errors where none was foreseen: at a line, at a call, at an await, by a signal. None is in the
code that ships: each is put there from outside, once, and is gone after it struck.
"""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import keepstep
from keepstep.client import copying, session, slot
from keepstep.save import save_thread, snapshot

_LIBRARY = keepstep.__file__.removesuffix("__init__.py")
SAVE_THREAD = "keepstep-save"
Place = tuple[str, int]


class Injected(Exception):
    """No error of ours, nor one that anybody foresaw."""


# --- at a line -------------------------------------------------------------------------------


def _traced(work: Callable[[], Any], at_line: Callable[[Place], None]) -> Any:
    """`work()`, with `at_line` called before each line of the library that this thread runs."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        if event == "line":
            at_line((frame.f_code.co_filename.removeprefix(_LIBRARY), frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(before)


def lines_of(work: Callable[[], Any]) -> list[Place]:
    """Every line of the library that `work` runs in this thread, in the order of its first time."""
    seen: dict[Place, None] = {}
    _traced(work, lambda place: seen.setdefault(place))
    return list(seen)


def raising_at(place: Place, error: BaseException, work: Callable[[], Any]) -> Any:
    """`work()`, which meets `error` when it first comes to that line."""
    left = [error]

    def strike(at: Place) -> None:
        if left and at == place:
            raise left.pop()

    return _traced(work, strike)


def raising_after(count: int, error: BaseException, work: Callable[[], Any]) -> Any:
    """`work()`, which meets `error` at the `count`-th line that it has not run before."""
    seen: set[Place] = set()

    def strike(at: Place) -> None:
        if at not in seen:
            seen.add(at)
            if len(seen) == count:
                raise error

    return _traced(work, strike)


# --- by a signal -----------------------------------------------------------------------------


class Hit(BaseException):
    """What the handler of a signal raises, as those of timeouts and preemptions do."""


@contextmanager
def signals() -> Iterator[Callable[[float, Callable[[], Any]], Any]]:
    """Gives `work_under(delay_s, work)`: a signal strikes after `delay_s` of this process' CPU, if
    `work` still runs then. (The timer of wall clock time is pytest-timeout's.)"""
    armed = False

    def handle(*_: object) -> None:
        if armed:
            raise Hit

    def work_under(delay_s: float, work: Callable[[], Any]) -> Any:
        nonlocal armed
        try:
            gc.disable()  # an error in a callback of the collector goes nowhere
            armed = True
            signal.setitimer(signal.ITIMER_VIRTUAL, delay_s)
            result = work()
            armed = False
            return result
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            gc.enable()

    before = signal.signal(signal.SIGVTALRM, handle)
    try:
        yield work_under
    finally:
        signal.signal(signal.SIGVTALRM, before)


# --- at a call, in the save thread ----------------------------------------------------------


def _calls() -> Iterator[tuple[Any, str]]:
    owners = (
        save_thread.SaveThread,
        snapshot.PendingImage,
        session.SidecarSession,
        session.SidecarClient,
        slot.SlotMapping,
    )
    for owner in owners:
        for name, var in vars(owner).items():
            if inspect.isfunction(var):
                yield owner, name
    yield copying, "run_transfers"


# The thread's own loop cannot be replaced while it runs. An error in what it asks between two tasks
# ends the thread, which is then replaced: `test_a_save_thread_that_ended_is_replaced`.
_LOOP = {"_work", "_is_due", "_next"}
CALLS = [
    call for call in _calls() if call not in {(save_thread.SaveThread, name) for name in _LOOP}
]


class SaveThreadFault:
    """One call of the save thread fails, before or after it did its work."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def arm(self, owner: Any, name: str, *, after: bool) -> None:
        """The next time that the save thread calls it."""
        original = getattr(owner, name)
        armed = [True]

        def failing(*arguments: Any, **options: Any) -> Any:
            strikes = armed and threading.current_thread().name == SAVE_THREAD
            if strikes:
                armed.clear()
                if not after:
                    raise Injected(f"before {name}")
            result = original(*arguments, **options)
            if strikes:
                raise Injected(f"after {name}")
            return result

        setattr(owner, name, failing)
        self._undo.append(lambda: setattr(owner, name, original))

    def disarm(self) -> None:
        """From now on nothing fails."""
        while self._undo:
            self._undo.pop()()
