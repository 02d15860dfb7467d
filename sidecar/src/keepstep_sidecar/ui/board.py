"""What all viewers see: one reader reads the runs periodically, as long as there is a viewer.

A run that is slow to answer (a sidecar that hangs, a volume over a network) delays only itself: it
is read again once it has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Final

from keepstep.errors import KeepstepError
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.ui.view import RunPage

EVERY_S: Final = 1.0
"""The pause between two reads of a run. With the time of the read and of the page, a change is seen
within 2 s.
"""

_log = logging.getLogger("keepstep.ui")


class Board:
    """The runs as they were read last.

    `names`: lists the runs. `read`: reads one run. Both may block: runs are read on threads of
    `readers`, and listed on another one, so that a read that hangs does not stop the list.
    """

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        read: Callable[[str], RunPage],
        readers: Executor,
    ) -> None:
        self.views: dict[str, RunPage] = {}
        self.changes = Changes()
        self.reads = 0
        self._names, self._read, self._readers = names, read, readers
        self._listed: tuple[str, ...] = ()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._read_at: dict[str, float] = {}
        self._viewers = 0
        self._keeping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """A viewer, for as long as this context is open."""
        self._viewers += 1
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="read runs")
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._keeping.cancel()
                self._keeping = None

    async def _keep(self) -> None:
        """Read the runs until cancelled, when there is no viewer any more."""
        while True:
            try:
                await self._list()
            except (OSError, KeepstepError) as error:  # may be away for only a moment
                _log.warning("the runs cannot be listed: %s", error)
            for name in self._listed:
                self._begin(name)
            await asyncio.sleep(EVERY_S)

    async def fresh(self, *, timeout_s: float = 3.0) -> tuple[RunPage, ...]:
        """All runs, each as recent as a viewer would see it. Runs that do not answer within
        `timeout_s` are returned as they were read last. Raises what listing the runs raises.
        """
        await self._list()
        before = time.monotonic() - EVERY_S
        stale = [name for name in self._listed if self._read_at.get(name, 0.0) < before]
        if begun := [self._begin(name) for name in stale]:
            await asyncio.wait(begun, timeout=timeout_s)
        return self.all()

    def all(self) -> tuple[RunPage, ...]:
        """All runs as they were read last, in the order of their list."""
        return tuple(self.view(name) for name in self._listed)

    def view(self, name: str) -> RunPage:
        """One run as it was read last. Raises KeyError if there is no such run."""
        if name not in self._listed:
            raise KeyError(name)
        return self.views.get(name) or RunPage(name=name, error="it has not answered yet")

    async def _list(self) -> None:
        listed = tuple(await asyncio.get_running_loop().run_in_executor(None, self._names))
        if listed != self._listed:
            self._listed = listed
            self.views = {name: view for name, view in self.views.items() if name in listed}
            self._read_at = {name: at for name, at in self._read_at.items() if name in listed}
            self.changes.ring()

    def _begin(self, name: str) -> asyncio.Task[None]:
        """Begin to read the run, or return the read that is under way."""
        if (reading := self._reading.get(name)) is None:
            reading = asyncio.create_task(self._refresh(name), name=f"read {name}")
            self._reading[name] = reading
        return reading

    async def _refresh(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            view = await loop.run_in_executor(self._readers, self._read, name)
        except KeepstepError as error:
            view = RunPage(name=name, error=str(error))
        except Exception as error:
            _log.exception("cannot read run %s", name)
            view = RunPage(name=name, error=f"{type(error).__name__}: {error}")
        finally:
            self._reading.pop(name, None)
        self.reads += 1
        self._read_at[name] = time.monotonic()
        if view != self.views.get(name) and name in self._listed:
            self.views[name] = view
            self.changes.ring()
