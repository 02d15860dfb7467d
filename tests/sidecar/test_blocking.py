"""Work on threads: whoever is cancelled goes on only when no thread works for it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepstep_sidecar.concurrency import run_blocking
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.source import ReadCancellation


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread."""
    with ThreadPoolExecutor(1) as made:
        yield made


class Filling:
    """Work that fills a buffer as soon as it may."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self.buffer = bytearray(4)

    def __call__(self, _: ReadCancellation | None = None) -> None:
        self.begun.set()
        self.may.wait(20)
        self.buffer[:] = b"full"

    async def is_waited_for(self, task: asyncio.Task[None]) -> None:
        await asyncio.to_thread(self.begun.wait, 20)
        for _ in range(3):
            task.cancel()
            done, _pending = await asyncio.wait([task], timeout=0.05)
            assert not done, "the buffer is given to another user while a thread fills it"
        self.may.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert self.buffer == b"full"


async def test_a_cancelled_caller_waits_for_its_thread_however_often_it_is_cancelled(
    thread: ThreadPoolExecutor,
) -> None:
    work = Filling()
    await work.is_waited_for(asyncio.create_task(run_blocking(thread, work)))


async def test_a_cancelled_transfer_waits_for_its_thread_too(thread: ThreadPoolExecutor) -> None:
    work = Filling()
    await work.is_waited_for(asyncio.create_task(verified_chunks.run_cancellable(thread, work)))


async def test_work_that_has_not_begun_when_its_caller_is_cancelled_never_begins(
    thread: ThreadPoolExecutor,
) -> None:
    first, second = Filling(), Filling()
    running = asyncio.create_task(run_blocking(thread, first))
    await asyncio.to_thread(first.begun.wait, 20)
    queued = asyncio.create_task(run_blocking(thread, second))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued  # although the thread stands still
    first.may.set()
    await running
    await run_blocking(thread, lambda: None)
    assert not second.begun.is_set()


async def test_an_error_of_blocking_work_is_raised_in_its_caller(
    thread: ThreadPoolExecutor,
) -> None:
    def fail() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await run_blocking(thread, fail)
