"""How parts of the sidecar wait for each other, run beside each other, and leave the event loop.

`Changes` is one bell for everything that waits: whoever changes the state rings, waiters look
again. All state lives on one event loop, so a predicate that is false stays false until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar, cast

from keepstep.errors import KeepstepError
from keepstep_sidecar.log import warn


class Changes:
    """Wakes every waiter at every change; a handful of long polls, so that costs nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """The state has changed; `count` grows."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, reached: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `reached()`; False when `timeout_s` have passed without."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not reached():
            left_s = deadline - loop.time()
            if left_s <= 0:
                return False
            waiter = loop.create_future()
            self._waiters.add(waiter)
            timer = loop.call_later(left_s, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiters.discard(waiter)
        return True

    async def after(self, count: int, *, timeout_s: float) -> bool:
        """Wait until something has changed since `count`; False when nothing did."""
        return await self.until(lambda: self.count != count, timeout_s=timeout_s)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


# --- background tasks ------------------------------------------------------------------------
#
# Background tasks: every one has a name and an owner, and none takes the process down.
#
# A failure is logged and the state it left is seen again by the next event; training goes on.
# What watches or works for as long as the process lives begins again: `keep`.


_LONGEST_PAUSE_S = 30.0
_log = logging.getLogger("keepstep.sidecar")


class Tasks:
    """Owns the background tasks of the process; an asynchronous context."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[bool]] = set()

    async def __aenter__(self) -> Tasks:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        for task in self._running:
            task.cancel()
        await self._group.__aexit__(*exception)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` beside everything else, until it ends or the process does."""
        task = self._group.create_task(_guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run `work()` as `spawn` does; if it fails, once more, less and less often."""
        self.spawn(_again(work, name), name)


async def _again(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    for failures in itertools.count():
        if await _guarded(work(), name):
            return
        await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE_S))


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> bool:
    """Whether it ended without an error."""
    try:
        await work
    except KeepstepError as error:
        warn("task failed", task=name, reason=str(error))
        return False
    except Exception:
        _log.exception("task failed", extra={"fields": {"task": name}})
        return False
    return True


# --- several at once -------------------------------------------------------------------------
#
# Unlike a task group, nothing is cancelled because another one failed: whoever hears of the error
# must be able to use again the buffers that the others were filling.


T = TypeVar("T")


async def all_of(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results, once all have ended; then the first error. Cancelling cancels all of them."""
    return _results(await asyncio.gather(*work, return_exceptions=True))


def _results(results: Sequence[T | BaseException]) -> list[T]:
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


async def few_at_once(calls: Sequence[Callable[[], Awaitable[T]]], *, most: int) -> list[T]:
    """`all_of` the calls, at most so many at a time."""
    slots = asyncio.Semaphore(most)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await call()

    return await all_of([one(call) for call in calls])


# --- blocking work ---------------------------------------------------------------------------


async def blocking(executor: Executor | None, work: Callable[[], T]) -> T:
    """Run `work` on a thread (None: the loop's own).

    A cancelled caller waits for it: a thread cannot be stopped, and it may still fill a slot that
    the caller is about to give to somebody else.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # seen: the cancellation is what counts
        raise


def detached(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` on a thread of its own that nothing waits for, not even the end of this process:
    for what may hang for ever, and may be lost."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


# --- priority --------------------------------------------------------------------------------
#
# Threads that step back behind the training.


def yield_to_others(niceness: int) -> None:
    """Give this thread at least that niceness; on Linux a nice value is a thread's own.

    A process that is nicer already stays so, as only root may take that back.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
