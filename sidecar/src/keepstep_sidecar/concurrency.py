"""How parts of the sidecar wait for each other, run side by side, and leave the event loop.

`ChangeNotifier` is one bell for all waiters: code that changes the state rings it, and waiters
check again. All state lives on one event loop, so a predicate that is false stays false until the
bell rings.
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
from keepstep.log import Journal


class ChangeNotifier:
    """Wakes every waiter at every change. There are only a few long polls, so this is cheap."""

    def __init__(self) -> None:
        self.count = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Tell waiters that the state has changed. Increases `count`."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, reached: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `reached()`. Returns False if `timeout_s` pass first."""
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
        except TimeoutError:
            return reached()
        return True

    async def after(self, count: int, *, timeout_s: float) -> bool:
        """Wait until something has changed since `count`. Returns False if nothing did."""
        return await self.until(lambda: self.count != count, timeout_s=timeout_s)


# --- background tasks ------------------------------------------------------------------------
#
# Background tasks. Each has a name and an owner, and none ends the process when it fails.
#
# A failure is logged. The next event sees the state that it left, and training goes on. Tasks that
# watch or work as long as the process lives are started again after a failure:
# `spawn_with_retries`.


_LONGEST_PAUSE_S = 30.0
_log, _journal = logging.getLogger("keepstep.sidecar"), Journal("keepstep.sidecar")


class Tasks:
    """Owns the background tasks of the process. An asynchronous context manager."""

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
        """Run `work` in the background until it ends or the process does."""
        task = self._group.create_task(_guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def spawn_with_retries(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run `work()` as `spawn` does. If it fails, run it again, with growing pauses."""
        self.spawn(_again(work, name), name)


async def _again(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    for failures in itertools.count():
        if await _guarded(work(), name):
            return
        await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE_S))


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> bool:
    """Await `work` and log an error. Returns whether it ended without an error."""
    try:
        await work
    except KeepstepError as error:
        _journal.warn("task.failed", task=name, error=str(error))
        return False
    except Exception:
        _log.exception("task.crashed", extra={"fields": {"task": name}})
        return False
    return True


# --- several at once -------------------------------------------------------------------------
#
# Unlike in a task group, an error cancels none of the others. A caller that gets the error must be
# able to reuse the buffers that the others were filling.


T = TypeVar("T")


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results, once all have ended; or the first error. Cancelling this cancels all of them."""
    values: list[T] = []
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


async def gather_limited(calls: Sequence[Callable[[], Awaitable[T]]], *, most: int) -> list[T]:
    """`gather_all` the calls, at most `most` at the same time."""
    slots = asyncio.Semaphore(most)

    async def limited(call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await call()

    return await gather_all([limited(call) for call in calls])


# --- blocking work ---------------------------------------------------------------------------


async def run_blocking(
    executor: Executor | None, work: Callable[[], T], *, stop: Callable[[], None] | None = None
) -> T:
    """Run `work` on a thread of `executor` (None: the loop's own).

    A cancelled caller calls `stop` and waits for the thread, however often it is cancelled: a
    thread cannot be stopped, and it may still fill a slot or write to a descriptor that the caller
    is about to give to another user. Work that has not begun by then is not begun.
    """
    lock, begun, abandoned = threading.Lock(), False, False

    def begin() -> T:
        nonlocal begun
        with lock:
            begun = not abandoned
        return work() if begun else cast("T", None)

    future = asyncio.get_running_loop().run_in_executor(executor, begin)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        with lock:
            abandoned = True
        if stop is not None:
            stop()
        while begun and not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if future.done() and not future.cancelled():
            future.exception()  # mark as retrieved: only the cancellation counts
        raise


class OnThread:
    """Runs blocking calls on a thread of `executor`. A cancelled caller does not wait for it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def run_on_detached_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` on a thread of its own that nothing waits for, not even the end of this process.
    For work that may hang for ever and may be lost."""
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
# Threads that give way to the training.


def raise_niceness(niceness: int) -> None:
    """Give this thread at least this niceness. On Linux, each thread has its own nice value.

    A thread that is already nicer stays so, because only root may lower a nice value.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


# --- chunks --------------------------------------------------------------------------------------


def for_each_chunk(
    work: Callable[[int], object], count: int, *, threads: int, niceness: int = 0
) -> None:
    """Call `work(0) ... work(count - 1)` on `threads` threads.

    The first exception ends the loop and is raised. No further chunk is begun, and running chunks
    are awaited first, so no thread touches any memory of theirs once this returns. Where there may
    be no more threads, those that could be started do all the work.
    """
    left, lock = iter(range(count)), threading.Lock()
    errors, done = list[BaseException](), list[int]()

    def take() -> int | None:
        with lock:
            return None if errors else next(left, None)

    def run() -> None:
        try:
            if niceness:
                raise_niceness(niceness)
            while (index := take()) is not None:
                work(index)
                done.append(index)
        except BaseException as error:
            errors.append(error)

    members: list[threading.Thread] = []
    for index in range(min(threads, count)):
        member = threading.Thread(target=run, name=f"keepstep-io-{index}")
        try:
            member.start()
        except RuntimeError:  # a limit of this process, or of its container
            if not members:
                raise
            break
        members.append(member)
    for member in members:
        member.join()
    if errors:
        raise errors[0]
    if len(done) != count:  # a thread that ended in another way must not count as one that worked
        raise RuntimeError(f"{len(done)} of {count} chunks were done")
