"""Blocking conversations with other pods, from the event loop: each can be cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from keepstep_sidecar.peer.credentials import Credentials
from keepstep_sidecar.peer.link import Link

T = TypeVar("T")

Connect = Callable[[], Link]
_THREADS = 16


class Calls:
    """Owns the threads that talk."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="peer")

    async def run(
        self, work: Callable[[Connect], T], address: str, *, expected: int | None = None
    ) -> T:
        """`work(connect)` on a thread; each `connect()` is a new link to `address`.

        When cancelled the links are cut, and this ends only after `work` has: nobody touches its
        buffers any more.
        """
        links = _Links(lambda: Link(address, self._credentials, expected=expected))
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, work, links.connect)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            links.abort()
            while not future.done():
                await asyncio.wait([future])
            future.exception()
            raise
        finally:
            links.close()

    async def here(self, work: Callable[[], T]) -> T:
        """`work()` on a thread: files of this machine."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """No more calls."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class _Links:
    """Every link of one call."""

    def __init__(self, make: Connect) -> None:
        self._make = make
        self._made: list[Link] = []
        self._aborted = False
        self._lock = threading.Lock()

    def connect(self) -> Link:
        link = self._make()
        with self._lock:
            self._made.append(link)
            if self._aborted:
                link.abort()
        return link

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for link in self._made:
                link.abort()

    def close(self) -> None:
        with self._lock:
            for link in self._made:
                link.close()
