"""What all viewers look at: runs are read once a second, by one reader, while somebody looks.

A run that is slow to answer (a sidecar that hangs, a volume over a network) keeps only itself
waiting: it is asked again when it has answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from keepstep.errors import KeepstepError
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.ui.view import RunView

EVERY_S: Final = 1.0
"""Between two reads of a run. With its own time, and that of the page, a change is seen within
2 s."""

_READERS: Final = 8
_log = logging.getLogger("keepstep.ui")


class Board:
    """`names`: which runs there are; `read`: one of them. Both may block."""

    def __init__(self, names: Callable[[], Sequence[str]], read: Callable[[str], RunView]) -> None:
        self.views: dict[str, RunView] = {}
        self.changes = Changes()
        self.reads = 0
        self._names, self._read = names, read
        self._listed: tuple[str, ...] = ()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._read_at: dict[str, float] = {}
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="keepstep-ui-read")
        self._viewers = 0
        self._watched = asyncio.Event()

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Somebody looks, for as long as this is open."""
        self._viewers += 1
        self._watched.set()
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._watched.clear()

    async def keep(self) -> None:
        """Read whenever somebody looks, for ever."""
        try:
            while True:
                await self._watched.wait()
                try:
                    await self._list()
                except OSError as error:  # a file system that is away for a moment
                    _log.warning("the directory cannot be listed: %s", error)
                for name in self._listed:
                    self._begin(name)
                await asyncio.sleep(EVERY_S)
        finally:
            self._readers.shutdown(wait=False, cancel_futures=True)

    async def fresh(self, *, timeout_s: float = 3.0) -> tuple[RunView, ...]:
        """All runs, none seen longer ago than a viewer would have it; those that do not answer in
        `timeout_s` as they were."""
        await self._list()
        stale = [one for one in self._listed if self._age_s(one) > EVERY_S]
        if begun := [self._begin(name) for name in stale]:
            await asyncio.wait(begun, timeout=timeout_s)
        return self.all()

    def all(self) -> tuple[RunView, ...]:
        """As they were seen last, by name."""
        return tuple(self.view(name) for name in self._listed)

    def view(self, name: str) -> RunView:
        """One of them. Raises KeyError where there is no such run."""
        if name not in self._listed:
            raise KeyError(name)
        return self.views.get(name, RunView(name=name, error="it has not answered yet"))

    def _age_s(self, name: str) -> float:
        return time.monotonic() - self._read_at.get(name, float("-inf"))

    async def _list(self) -> None:
        loop = asyncio.get_running_loop()
        listed = tuple(await loop.run_in_executor(None, self._names))
        if listed != self._listed:
            self._listed = listed
            self.views = {name: view for name, view in self.views.items() if name in listed}
            self.changes.ring()

    def _begin(self, name: str) -> asyncio.Task[None]:
        """A read of the run, or the one that is under way."""
        if (reading := self._reading.get(name)) is None:
            reading = asyncio.create_task(self._look(name), name=f"read {name}")
            self._reading[name] = reading
        return reading

    async def _look(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            view = await loop.run_in_executor(self._readers, self._read, name)
        except KeepstepError as error:
            view = RunView(name=name, error=str(error))
        except Exception as error:
            _log.exception("cannot read run %s", name)
            view = RunView(name=name, error=f"{type(error).__name__}: {error}")
        finally:
            self._reading.pop(name, None)
        self.reads += 1
        self._read_at[name] = time.monotonic()
        if view != self.views.get(name) and name in self._listed:
            self.views[name] = view
            self.changes.ring()
